"""Tests that follow the cures of errors in TRL trainers."""

import functools

import pytest
import torch
from datasets import Dataset
from peft import PrefixTuningConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallel_state import parallel_state
from tests.integration.integrations.trl import test_base, test_online
from tests.integration.integrations.trl.test_base import OwnLoss, adapter, compare, policy, preferences
from tests.integration.integrations.trl.test_online import (
    RECORDED,
    REWARDS,
    ROUNDING,
    SIZES,
    make_trainer,
    prompts,
    reward_model,
    save_experts,
    vowels,
)

configs = test_online.configs
BRIEF = {"max_steps": 2, "eval_strategy": "no"}


@pytest.fixture(autouse=True)
def further_options(monkeypatch):
    monkeypatch.setattr(test_base, "MADE", (*test_base.MADE, "data_collator"))
    monkeypatch.setattr(test_base, "GIVEN", (*test_base.GIVEN, "rollout_func"))


def train_dpo(path, output, text, message, trainer_class=DPOTrainer, **options):
    """Trains on all ranks and expects an error."""
    layout = test_base.layout(text)
    others = {name: options.pop(name) for name in ("peft_config", "data_collator") if name in options}
    sizes = {"per_device_train_batch_size": 4 // (layout.dp_size or 1)} | BRIEF

    def on_rank():
        arguments = DPOConfig(str(output), **(test_base.DEFAULTS | sizes | options))
        rows = Dataset.from_list(preferences(8))
        with pytest.raises(UnsupportedError, match=message):
            trainer_class(policy(path, layout, DPOTrainer), args=arguments, train_dataset=rows, **others).train()

    run_ranks(on_rank, 2)


def compare_dpo(stories, tmp_path, text, **options):
    options = BRIEF | {"max_steps": 3, "learning_rate": 1e-4} | options
    compare(stories, tmp_path, text, DPOTrainer, preferences, tolerance=1e-4, **options)


def make_prefixes(path, config):
    return PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")


def test_global_batch_loss_gets_another_adapter(stories, tmp_path):
    message = "Prefix tuning .* Use dp_size=1, another adapter, or another loss"
    train_dpo(stories, tmp_path, "dp2", message, loss_type="aot", peft_config=make_prefixes(None, None))
    compare_dpo(stories, tmp_path, "dp2", loss_type="aot", peft_config=adapter)


def test_global_batch_loss_is_computed_by_dpo_trainer(stories, tmp_path):
    message = (
        "OwnLoss, loss_type = 'aot' .*Use DPOTrainer's _compute_loss, dp_size=1 .with tp_size or pp_size., or another"
    )
    train_dpo(stories, tmp_path, "dp2", message, OwnLoss, loss_type="aot")
    compare_dpo(stories, tmp_path, "dp2", loss_type="aot")


def test_reference_log_probs_are_cached_next_to_files(stories, tmp_path):
    message = r"Load the dataset from files, or with load_from_disk\(...\) after save_to_disk\(...\)"
    train_dpo(stories, tmp_path, "tp2", message, precompute_ref_log_probs=True)
    # `compare` loads the dataset from disk.
    compare_dpo(stories, tmp_path, "tp2", precompute_ref_log_probs=True)


class CollatorWithPositions(DataCollatorForPreference):
    """Adds positions `[1, sequence]`, which are neither per token of each sample nor per pair."""

    def __call__(self, *args, **kwargs):
        batch = super().__call__(*args, **kwargs)
        return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}


def make_collator(path, config):
    return CollatorWithPositions(AutoTokenizer.from_pretrained(path).eos_token_id)


@pytest.mark.parametrize(("text", "options"), [("dp2", {}), ("tp2", {"loss_type": "aot"})])
def test_inputs_of_all_samples_need_another_loss(stories, tmp_path, text, options):
    message = "position_ids.* in a batch of 2 data-parallel ranks.* Use dp_size=1, or another loss"
    collator = make_collator(stories, None)
    train_dpo(stories, tmp_path, "dp2", message, loss_type="aot", data_collator=collator)
    compare_dpo(stories, tmp_path, text, data_collator=make_collator, **options)


def test_single_device_options_are_set_to_false(stories, tmp_path):
    switches = ("use_vllm", "use_transformers_continuous_batching", "cast_lm_head_to_fp32")

    def on_rank():
        for name in switches:
            with pytest.raises(UnsupportedError, match=f"{name}=True is not supported .* Set it to False"):
                make_trainer(stories, tmp_path, "tp2", vowels, **{name: True})

    run_ranks(on_rank, 2)
    options = SIZES | REWARDS | BRIEF | dict.fromkeys(switches, False)
    compare(stories, tmp_path, "tp2", GRPOTrainer, prompts, **ROUNDING, **options)


def judge_by_function(path, config):
    """Returns a reward function that calls a model of this rank."""
    judge = reward_model(path, None).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, pad_token="</s>")

    @torch.no_grad()
    def judge_completions(completions, **kwargs):
        return judge(**tokenizer(completions, return_tensors="pt", padding=True)).logits[:, 0].tolist()

    return judge_completions


@pytest.mark.parametrize("make", [reward_model, judge_by_function])
def test_judge_is_passed_itself_or_loaded_without_a_layout(stories, tmp_path, make):
    def on_rank():
        judge = reward_model(stories, test_base.layout("tp2"))

        def judge_completions(completions, **kwargs):
            return judge(torch.ones(len(completions), 4, dtype=torch.long)).logits[:, 0].tolist()

        message = "Pass the model itself in reward_funcs, or load it without megatron_config"
        with pytest.raises((UnsupportedError, RuntimeError), match=message):
            make_trainer(stories, tmp_path, "tp2", judge_completions).train()

    run_ranks(on_rank, 2)
    compare(stories, tmp_path, "tp2", GRPOTrainer, prompts, rewards_of={"judge": make}, **ROUNDING, **SIZES, **BRIEF)


def test_bnpo_has_no_router_loss_on_replicas(stories, tmp_path):
    experts = tmp_path / "experts" / "model"
    run_ranks(functools.partial(save_experts, stories, experts), 1)

    def on_rank():
        options = {"loss_type": "bnpo", "per_device_train_batch_size": 2}
        message = "Set router_aux_loss_coef=0.0, or use another loss_type"
        with pytest.raises(UnsupportedError, match=message):
            make_trainer(experts, tmp_path, "dp2", vowels, **options).train()

    run_ranks(on_rank, 2)
    for options in ({"loss_type": "bnpo", "router_aux_loss_coef": 0.0}, {"loss_type": "grpo"}):
        options = SIZES | REWARDS | RECORDED | BRIEF | options
        compare(experts, tmp_path, "dp2", GRPOTrainer, prompts, **ROUNDING, **options)


def roll_out(prompts, trainer):
    """Returns completions that depend on the position of the prompt in the global batch."""
    state, rows = parallel_state(trainer.model), len(prompts)
    first = 0 if state is None else state.mesh.dp_rank * rows
    ids = trainer.processing_class(prompts)["input_ids"]
    completions = [[(7 * (first + row) + 3 * token) % 500 + 5 for token in range(6)] for row in range(rows)]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def test_rollouts_use_only_data_parallelism(stories, tmp_path):
    def on_rank():
        message = "Use only dp_size, or generate beforehand"
        with pytest.raises(UnsupportedError, match=message):
            make_trainer(stories, tmp_path, "tp2", vowels, more={"rollout_func": roll_out})

    run_ranks(on_rank, 2)
    options = SIZES | REWARDS | BRIEF | {"rollout_func": roll_out}
    compare(stories, tmp_path, "dp2", GRPOTrainer, prompts, **ROUNDING, **options)


def test_entropy_bonus_uses_model_parallelism_or_is_unset(stories, tmp_path):
    def on_rank():
        message = "Use dp_size=1 with tp_size or pp_size, or leave it unset"
        with pytest.raises(UnsupportedError, match=message):
            make_trainer(stories, tmp_path, "dp2", vowels, entropy_coef=0.1)

    run_ranks(on_rank, 2)
    options = SIZES | REWARDS | RECORDED | BRIEF
    for text, coefficient in (("tp2", {"entropy_coef": 0.1}), ("dp2", {})):
        compare(stories, tmp_path, text, GRPOTrainer, prompts, **ROUNDING, **options, **coefficient)
