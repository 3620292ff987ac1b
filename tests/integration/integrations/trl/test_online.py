"""Tests of TRL trainers that generate within a step, GRPO and RLOO, against a single process."""

import dataclasses
import functools
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.expert_parallel import router_replay
from hf_megatron.integrations.transformers import generation
from hf_megatron.parallel_state import parallel_state
from tests.integration.integrations.trl import test_base
from tests.integration.integrations.trl.test_base import StopsAt, adapter, compare, preferences

LAYOUTS = ["tp2", "tp2+sp", "pp2", "dp2", "tp2+pp2", "cp2"]
SIZES = {
    # A small epsilon would turn round-off gradients into full steps, visible in the KL divergence.
    "adam_epsilon": 1e-5,
    "num_generations": 4,
    "max_completion_length": 8,
    "gradient_accumulation_steps": 2,
    "beta": 0.1,
    "temperature": 0.9,
    "learning_rate": 1e-4,
}


@pytest.fixture(autouse=True)
def configs(monkeypatch):
    for trainer_class, config_class in {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}.items():
        monkeypatch.setitem(test_base.CONFIGS, trainer_class, config_class)
    monkeypatch.setattr(test_base, "UNEQUAL", (*test_base.UNEQUAL, "step_time"))


def prompts(count, seed=0):
    return [{"prompt": row["prompt"], "favourite": row["chosen"][7]} for row in preferences(count, seed)]


def vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]


def has_favourite(completions, favourite, log_extra, log_metric, **kwargs):
    """Reward function that returns None for short texts."""
    log_extra("letter", list(favourite))
    log_metric("length", sum(map(len, completions)) / len(completions))
    return [None if len(text) < 4 else text.count(letter) for text, letter in zip(completions, favourite, strict=True)]


def use_recorded_completions(model):
    """Replaces generation by fixed completions for the global batch; each replica uses those for its samples."""
    calls = iter(range(1000))
    path = Path(model.config._name_or_path)
    text = (path.parent / "tinystories_sample.txt").read_text()[:4000]
    story = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"][0]
    state = parallel_state(model)
    size, rank = (1, 0) if state is None else (state.mesh.dp_size, state.mesh.dp_rank)

    def generate(input_ids, **kwargs):
        rows = len(input_ids)
        generator = torch.Generator().manual_seed(next(calls))
        places = torch.randint(0, len(story) - 8, (rows * size, 1), generator=generator)
        tokens = story[places + torch.arange(8)]
        ends = torch.randint(2, 9, (rows * size, 1), generator=generator)
        tokens = tokens.where(torch.arange(8) < ends, 2)
        return torch.cat([input_ids, tokens[rank * rows : (rank + 1) * rows]], 1)

    model.generate = generate


RECORDED = {"prepare": use_recorded_completions}
# The KL divergence sums differences of log-probabilities around -4.
ROUNDING = {"tolerance": 1e-4, "absolute": 1e-4}
REWARDS = {"reward_funcs": [vowels, has_favourite]}


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("text", LAYOUTS)
def test_training(stories, tmp_path, text, trainer_class):
    options = SIZES | REWARDS | (RECORDED if "dp" in text else {})
    compare(stories, tmp_path, text, trainer_class, prompts, **ROUNDING, **options)


OFF_POLICY = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8, "eval_strategy": "no"}


@pytest.mark.parametrize(
    ("text", "trainer_class", "options"),
    [
        ("tp2", GRPOTrainer, {"loss_type": "grpo", "top_entropy_quantile": 0.5, "top_p": 0.9, "top_k": 20}),
        ("pp2", GRPOTrainer, {"gradient_checkpointing": True, "mask_truncated_completions": True}),
        ("pp2", GRPOTrainer, OFF_POLICY | {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        ("tp2+dp2", GRPOTrainer, OFF_POLICY | {"loss_type": "bnpo"}),
        ("dp2", GRPOTrainer, OFF_POLICY | {"loss_type": "grpo", "scale_rewards": "batch", "top_entropy_quantile": 0.5}),
        ("dp2+zero3", GRPOTrainer, {"loss_type": "dr_grpo", "sync_ref_model": True, "ref_model_sync_steps": 1}),
        ("pp2+dp2", RLOOTrainer, OFF_POLICY | {"normalize_advantages": True}),
        ("tp2", GRPOTrainer, {"entropy_coef": 0.01, "loss_type": "vespo", "by_name": True}),
    ],
)
def test_options(stories, tmp_path, text, trainer_class, options):
    options = {"max_steps": 2, "eval_steps": 2} | SIZES | REWARDS | (RECORDED if "dp" in text else {}) | options
    compare(stories, tmp_path, text, trainer_class, prompts, **ROUNDING, **options)


KINDS = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo", "luspo")


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_grpo_loss_type(stories, tmp_path, text, kind):
    options = SIZES | REWARDS | RECORDED | OFF_POLICY | {"loss_type": kind, "max_steps": 4}
    # VESPO's weights are powers of sequence-level probability ratios.
    rounding = dict.fromkeys(ROUNDING, 1e-3) if kind == "vespo" else ROUNDING
    compare(stories, tmp_path, text, GRPOTrainer, prompts, **rounding, **options)


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2", "dp2", "tp2+pp2", "cp2"])
def test_adapters(stories, tmp_path, text, trainer_class):
    """The reference is the same model without its adapter."""
    options = SIZES | REWARDS | (RECORDED if "dp" in text else {}) | {"peft_config": adapter, "learning_rate": 1e-3}
    compare(stories, tmp_path, text, trainer_class, prompts, **ROUNDING, **options)


def save_experts(stories, folder):
    """A model with four experts and the tokenizer of the stories."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    shutil.copy(stories.parent / "tinystories_sample.txt", folder.parent)


@pytest.fixture(scope="module")
def experts(stories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    save_experts(stories, folder)
    return folder


@pytest.mark.parametrize("text", ["tp2+ep2", "dp2+ep2", "tp2+sp", "pp2"])
def test_moe_models(experts, tmp_path, text):
    options = SIZES | REWARDS | (RECORDED if "dp" in text else {})
    compare(experts, tmp_path, text, GRPOTrainer, prompts, **ROUNDING, **options)


@pytest.mark.parametrize("loss_type", ["sigmoid", "aot"])
def test_dpo_on_moe_models(experts, tmp_path, loss_type):
    """Includes the router loss of evaluations."""
    options = {"loss_type": loss_type, "learning_rate": 1e-4, "max_steps": 2, "eval_steps": 2}
    compare(experts, tmp_path, "dp2", DPOTrainer, preferences, **ROUNDING, **options)


def test_replicas_sample_independently(stories, tmp_path):
    """Uses ZeRO-3 weights, and completions that end at different positions."""

    def train():
        options = {"num_generations": 8, "generation_kwargs": {"eos_token_id": [2, 346, 261]}}
        trainer = make_trainer(stories, tmp_path, "dp2+zero3", vowels, **options)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        return list(trainer._logs["completion"]), {name: log[0][name] for name in log[0] if name != "step_time"}

    (texts, log), (others, other) = run_ranks(train, 2)
    assert texts == others and log == other and len(texts) == 16
    halves = [texts[start : start + 4] for start in (0, 8)], [texts[start + 4 : start + 8] for start in (0, 8)]
    assert halves[0] != halves[1], "of one prompt the ranks draw other completions"


def test_streamed_prompts(stories, tmp_path):
    """Each rank reads the stream; the samples match a single process."""
    logs_by_layout = [
        run_ranks(train_on_stream, ranks, stories, tmp_path, text)
        for text, ranks in ((None, 1), ("tp2", 2), ("dp2", 2))
    ]
    for logs in logs_by_layout[1:]:
        for log in logs:
            assert log == pytest.approx(logs_by_layout[0][0], rel=1e-4, abs=1e-4)


def train_on_stream(path, output, text):
    layout = None if text is None else test_base.layout(text)
    model = test_base.policy(path, layout, GRPOTrainer)
    use_recorded_completions(model)
    sizes = {"max_steps": 2, "eval_strategy": "no"}
    sizes |= {"per_device_train_batch_size": 4 // (1 if layout is None else layout.dp_size or 1)}
    rows = Dataset.from_list(prompts(8)).to_iterable_dataset()
    trainer = GRPOTrainer(model, vowels, GRPOConfig(str(output), **(test_base.DEFAULTS | SIZES | sizes)), rows)
    trainer.train()
    [log] = [entry for entry in trainer.state.log_history if entry["step"] == 2 and "loss" in entry]
    return {name: log[name] for name in log if name != "step_time"}


def add_random_noise(completions, **kwargs):
    """Reward function that advances all RNGs of the ranks on which it is called."""
    noise = float(torch.rand(())) + float(numpy.random.rand()) + random.random()
    return [len(text) / 10 + noise for text in completions]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2"])
def test_random_rewards(stories, tmp_path, text, trainer_class):
    options = SIZES | {"reward_funcs": [add_random_noise], "max_steps": 3, "eval_strategy": "no"}
    compare(stories, tmp_path, text, trainer_class, prompts, **ROUNDING, **options)


def test_missing_reward_stops_all_ranks(stories, tmp_path):
    def train():
        trainer = make_trainer(stories, tmp_path, "tp2", lambda completions, **kwargs: [1.0])
        with pytest.raises((ValueError, RuntimeError), match="returned 1 rewards for 8 completions"):
            trainer.train()

    run_ranks(train, 2)


def evaluate_prompts(path, output, text):
    layout = None if text is None else test_base.layout(text)
    model = test_base.policy(path, layout, GRPOTrainer)
    use_recorded_completions(model)
    size = 8 // (1 if layout is None else layout.dp_size or 1)
    args = test_base.DEFAULTS | SIZES | {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    rows = Dataset.from_list(prompts(8))
    trainer = GRPOTrainer(model, vowels, GRPOConfig(str(output), **args), rows, Dataset.from_list(prompts(6)))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return [entry[name] for entry in entries for name in ("eval_loss", "eval_reward")]


def test_evaluation_with_partial_last_batch(stories, tmp_path):
    """Accelerate truncates the last batch by prompts, although each prompt has several completions."""
    [alone] = run_ranks(evaluate_prompts, 1, stories, tmp_path, None)
    for losses in run_ranks(evaluate_prompts, 2, stories, tmp_path, "dp2"):
        assert losses == pytest.approx(alone, rel=1e-4, abs=1e-5)


def train_part(path, output, text, until, resume):
    """Trains until a step and returns its log entry."""
    model = test_base.policy(path, None if text is None else test_base.layout(text), GRPOTrainer)
    arguments = test_base.DEFAULTS | SIZES | {"max_steps": 4, "eval_strategy": "no", "temperature": 1.0}
    arguments |= {"save_strategy": "steps", "save_steps": 2}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=GRPOConfig(str(output), **arguments),
        train_dataset=Dataset.from_list(prompts(8)),
        callbacks=[StopsAt(until)],
    )
    trainer.train(resume_from_checkpoint=resume)
    [entry] = [entry for entry in trainer.state.log_history if entry["step"] == until and "loss" in entry]
    return {name: value for name, value in entry.items() if name != "step_time"}


def test_training_resumes_on_another_layout(stories, tmp_path):
    """Samples continue with the resumed RNG state, too."""
    [expected] = run_ranks(train_part, 1, stories, tmp_path / "alone", None, 4, None)
    run_ranks(train_part, 2, stories, tmp_path / "split", "tp2", 2, None)
    for log in run_ranks(train_part, 2, stories, tmp_path / "split", "pp2", 4, True):
        assert log == pytest.approx(expected, rel=1e-4, abs=1e-4)


def train_with_replay(path, output, text, trainer_class, replays):
    """Returns the number of expert choices equal to generation, of all choices, and the logged losses."""
    layout = dataclasses.replace(test_base.layout(text), router_replay=replays)
    model = test_base.policy(path, layout, trainer_class)
    # Weights change between the steps on a batch of completions.
    sizes = SIZES | {"learning_rate": 3e-2, "steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 4}
    arguments = (
        test_base.DEFAULTS | sizes | {"eval_strategy": "no", "per_device_train_batch_size": 4 // (layout.dp_size or 1)}
    )
    config = test_base.CONFIGS[trainer_class](str(output), **arguments)
    trainer = trainer_class(model, [vowels], config, train_dataset=Dataset.from_list(prompts(8)))
    compute_loss, compute_statistics, same, count = (
        trainer._compute_loss,
        trainer._get_per_token_logps_and_entropies,
        0,
        0,
    )
    samples_of_call = {}

    def record_samples(model, rows):
        samples_of_call.update(rows)
        return compute_loss(model, rows)

    def compare_routing(*args, **kwargs):
        nonlocal same, count
        with router_replay.record_routing(trainer.model) as routing:
            outputs = compute_statistics(*args, **kwargs)
        if replays and torch.is_grad_enabled():
            parts = [samples_of_call["prompt_routing"], samples_of_call["completion_routing"]]
            recorded_experts = torch.cat(parts, 1).permute(2, 0, 1, 3)
            mask = recorded_experts >= 0
            same += int((routing.calls[0].sort().values == recorded_experts.sort().values)[mask].sum())
            count += int(mask.sum())
        return outputs

    trainer._compute_loss, trainer._get_per_token_logps_and_entropies = record_samples, compare_routing
    trainer.train()
    return same, count, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("text", ["tp2+ep2", "dp2+ep2", "pp2"])
def test_router_replay_reuses_generation_experts(experts, tmp_path, text, trainer_class):
    ranks = 2
    results = run_ranks(train_with_replay, ranks, experts, tmp_path, text, trainer_class, True)
    for same, count, losses in results:
        assert same == count > 500
        assert losses == results[0][2]
    without = run_ranks(train_with_replay, ranks, experts, tmp_path, text, trainer_class, False)
    assert results[0][2][0] == pytest.approx(without[0][2][0], rel=1e-4, abs=1e-5), "weights were the same"
    assert results[0][2][-1] != pytest.approx(without[0][2][-1], rel=1e-3)


# Learnable task: a full stop after six tokens


def ends_in_time(completion_ids, stop, **kwargs):
    places = [ids.index(stop[0]) if stop[0] in ids else 12 for ids in completion_ids]
    return [1 - abs(place - 6) / 6 for place in places]


def train_on_task(path, output, text):
    layout = None if text is None else test_base.layout(text)
    model = test_base.policy(path, layout, GRPOTrainer)
    stop = AutoTokenizer.from_pretrained(path)(".")["input_ids"][-1]
    sizes = {"num_generations": 8, "max_completion_length": 12, "max_steps": 40, "learning_rate": 5e-4}
    sizes |= {"per_device_train_batch_size": 16 // (1 if layout is None else layout.dp_size or 1)}
    sizes |= {"logging_steps": 5, "eval_strategy": "no", "lr_scheduler_type": "constant"}
    rows = Dataset.from_list([row | {"stop": stop} for row in prompts(64)])
    trainer = GRPOTrainer(model, ends_in_time, GRPOConfig(str(output), **test_base.DEFAULTS | sizes), rows)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def test_task_is_learned(stories, tmp_path):
    [alone] = run_ranks(train_on_task, 1, stories, tmp_path, None, timeout=300)
    assert alone[0] < 0.6 and alone[-1] > 0.9
    for text, ranks in (("pp2", 2), ("tp2+dp2", 4)):
        results = run_ranks(train_on_task, ranks, stories, tmp_path, text, timeout=300)
        assert all(rewards == results[0] for rewards in results)
        assert results[0][-1] > alone[-1] - 0.05, text
        # Early samples match except for rounding.
        assert text == "tp2+dp2" or results[0][:2] == pytest.approx(alone[:2], abs=0.02)


# Seeded faults


def gather_over_world(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def gather_rewards_over_world(model, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "gather", gather_over_world)


def use_first_replica_samples(model, monkeypatch):
    monkeypatch.setattr(Accelerator, "process_index", property(lambda self: 0))


def normalize_by_all_ranks(model, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: dist.get_world_size()))


def use_policy_as_reference(model, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", lambda *args, **kwargs: model)


def generate_with_initial_weights(model, monkeypatch):
    model.generate = test_base.policy(model.config._name_or_path, parallel_state(model).config, GRPOTrainer).generate


def sample_with_unsynchronized_rng(model, monkeypatch):
    original = model.generate

    def generate(*args, **kwargs):
        torch.manual_seed(dist.get_rank())
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "broadcast_state", lambda *args: None)
    model.generate = generate


def skip_sample_shuffling(model, monkeypatch):
    use_recorded_completions(model)
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)


FAULTS = {
    gather_rewards_over_world: ("tp2", {}),
    use_first_replica_samples: ("dp2", {"num_generations": 8, **RECORDED}),
    normalize_by_all_ranks: ("pp2", {}),
    use_policy_as_reference: ("tp2", {}),
    generate_with_initial_weights: ("pp2", {"learning_rate": 2e-3}),
    sample_with_unsynchronized_rng: ("tp2", {"generation_kwargs": {"min_new_tokens": 8}}),
    skip_sample_shuffling: ("dp2", OFF_POLICY | RECORDED),
}


def apply_fault(fault, before, model):
    if before is not None:
        before(model)
    if parallel_state(model) is not None:
        fault(model, pytest.MonkeyPatch())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected(stories, tmp_path, fault):
    text, options = FAULTS[fault]
    options = {"max_steps": 3, "eval_strategy": "no"} | SIZES | REWARDS | options
    with pytest.raises((AssertionError, RankError)):
        compare_with_fault(fault, stories, tmp_path, text, options)
    # Without the fault the same run matches.
    compare(stories, tmp_path, text, GRPOTrainer, prompts, **ROUNDING, **options)


def compare_with_fault(fault, stories, tmp_path, text, options):
    options = options | {"prepare": functools.partial(apply_fault, fault, options.get("prepare"))}
    compare(stories, tmp_path, text, GRPOTrainer, prompts, **ROUNDING, **options)


# Rewards, batch sizes and rejected options


def reward_model(path, config):
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, megatron_config=config)
    model.config.pad_token_id = 2
    return model


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_reward_model(stories, tmp_path, text):
    options = {"max_steps": 2, "eval_strategy": "no"} | SIZES
    compare(stories, tmp_path, text, GRPOTrainer, prompts, rewards_of={"model": reward_model}, **ROUNDING, **options)


def make_trainer(
    path, output, text, reward, trainer_class=GRPOTrainer, config_class=GRPOConfig, rows=8, more=(), **given
):
    model = test_base.policy(path, test_base.layout(text), trainer_class)
    arguments = test_base.DEFAULTS | SIZES | {"max_steps": 1, "eval_strategy": "no"} | given
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(str(output), **arguments),
        train_dataset=Dataset.from_list(prompts(8)),
        **dict(more),
    )


def test_reward_functions_are_called_once_per_replica(stories, tmp_path):
    def train():
        calls = []

        async def later(completions, **kwargs):
            calls.append(len(completions))
            return [float(len(text)) for text in completions]

        def now(completions, log_metric, **kwargs):
            calls.append(len(completions))
            log_metric("calls", len(calls))
            # The rewards differ by rank.
            return [float(dist.get_rank() + number) for number in range(len(completions))]

        trainer = make_trainer(stories, tmp_path, "tp2+pp2+dp2", [later, now], per_device_train_batch_size=2)
        trainer.train()
        log = trainer.state.log_history[0]
        names = ("rewards/later/mean", "rewards/now/mean", "calls", "num_tokens")
        return calls, [log[name] for name in names], len(trainer._logs["completion"])

    results = run_ranks(train, 8)
    called = [calls for calls, _, _ in results if calls]
    assert called == [[4, 4], [4, 4]], "once for each of the two replicas"
    assert all(log == results[0][1] and count == 8 for _, log, count in results), "every rank logs the same"


def test_failing_reward_function_stops_all_ranks(stories, tmp_path):
    def raise_error(completions, **kwargs):
        raise ValueError("no such judge")

    def train():
        with pytest.raises((ValueError, RuntimeError), match="no such judge"):
            make_trainer(stories, tmp_path, "pp2", raise_error).train()

    run_ranks(train, 2)


def test_parallelized_judge_in_reward_function_is_rejected(stories, tmp_path):
    def train():
        judge = reward_model(stories, test_base.layout("tp2"))

        def judge_completions(completions, **kwargs):
            return judge(torch.ones(len(completions), 4, dtype=torch.long)).logits[:, 0].tolist()

        with pytest.raises((UnsupportedError, RuntimeError), match="Pass the model itself in reward_funcs"):
            make_trainer(stories, tmp_path, "tp2", judge_completions).train()

    run_ranks(train, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (8, 2)),
        ({"generation_batch_size": 12}, (12, 3)),
        ({"steps_per_generation": 3}, (12, 3)),
        ({"gradient_accumulation_steps": 1}, (4, 1)),
    ],
)
@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig])
def test_generation_batch_sizes_count_replicas(stories, tmp_path, given, expected, config_class):
    """Covers arguments created after the model, and before it, where replicas are not yet known."""
    trainer_class = {GRPOConfig: GRPOTrainer, RLOOConfig: RLOOTrainer}[config_class]
    arguments = test_base.DEFAULTS | SIZES | {"report_to": "none"} | given

    def build(knows):
        args = None if knows else config_class(str(tmp_path), **arguments)
        model = test_base.policy(stories, test_base.layout("tp2"), trainer_class)
        args = args or config_class(str(tmp_path), **arguments)
        rows = Dataset.from_list(prompts(4))
        trainer = trainer_class(model, vowels, args, train_dataset=rows, eval_dataset=rows)
        return trainer.args.generation_batch_size, trainer.args.steps_per_generation

    for knows in (False, True):
        assert run_ranks(build, 2, knows) == [expected] * 2


def test_arguments_created_before_import_are_rejected(stories, tmp_path):
    def build():
        args = GRPOConfig(str(tmp_path), **(test_base.DEFAULTS | SIZES))
        # Value as derived by stock TRL.
        del vars(args)["_hf_megatron_given"]
        args.generation_batch_size = 16
        model = test_base.policy(stories, test_base.layout("tp2"), GRPOTrainer)
        with pytest.raises(ConfigError, match="generation_batch_size = 16: expected 8, .* count all ranks"):
            GRPOTrainer(model, vowels, args, train_dataset=Dataset.from_list(prompts(4)))

    run_ranks(build, 2)


def test_evaluation_size_that_splits_groups_is_rejected(stories, tmp_path):
    def build():
        # Created before the model, TRL checks the size as if both ranks had samples of their own.
        options = {"eval_strategy": "steps", "per_device_eval_batch_size": 2}
        args = GRPOConfig(str(tmp_path), **(test_base.DEFAULTS | SIZES | options))
        model = test_base.policy(stories, test_base.layout("tp2"), GRPOTrainer)
        rows = Dataset.from_list(prompts(4))
        with pytest.raises(ConfigError, match="per_device_eval_batch_size=2 on 1 data"):
            GRPOTrainer(model, vowels, args, train_dataset=rows, eval_dataset=rows)

    run_ranks(build, 2)


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (
            "tp2",
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            r"generation_batch_size=2 \(.* 1 da",
        ),
        ("tp2", {"generation_batch_size": 10}, "generation_batch_size=10: expected a multiple of 4"),
        (
            "dp2",
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
            r"generation_batch_size=2 \(.* 2 d",
        ),
        ("tp2", {"use_vllm": True}, "use_vllm=True .*the parallelized model generates itself"),
        ("tp2", {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True"),
        ("tp2", {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
        ("dp2", {"entropy_coef": 0.1}, "entropy_coef or use_adaptive_entropy .* on 2 data-parallel ranks"),
        ("tp2", {"more": {"rollout_func": vowels}}, "GRPOTrainer.rollout_func=.*sharded over 2 ranks"),
        ("pp2", {"more": {"tools": [vowels]}}, "GRPOTrainer.tools=.*sharded over 2 ranks"),
    ],
)
def test_unsupported_options_are_rejected(stories, tmp_path, text, given, message):
    def build():
        with pytest.raises((ConfigError, UnsupportedError), match=message):
            make_trainer(stories, tmp_path, text, vowels, **given)

    run_ranks(build, 2)


def test_evaluation_with_repeated_samples_is_rejected(stories, tmp_path):
    def build():
        trainer = make_trainer(stories, tmp_path, "dp2", vowels, per_device_eval_batch_size=4)
        with pytest.raises(UnsupportedError, match="the last of 2 batches of 8 samples has 4"):
            trainer.evaluate(Dataset.from_list(prompts(3)))

    run_ranks(build, 2)


# Frozen models with other layouts


def make_frozen_layout(text, **frozen):
    return dataclasses.replace(test_base.layout(text), frozen_models=frozen)


WHOLE_SHARDED = {"tp_size": 1, "pp_size": 1, "sequence_parallel": False, "zero_stage": 3}


@pytest.mark.parametrize(
    ("text", "frozen"),
    [
        ("dp2", {"reference": {"zero_stage": 3}}),
        ("tp2", {"reference": WHOLE_SHARDED, "reward": WHOLE_SHARDED}),
        ("pp2", {"reference": WHOLE_SHARDED | {"tp_size": 2}}),
        ("tp2+pp2", {"reference": WHOLE_SHARDED, "reward": {"pp_size": 1}}),
    ],
)
def test_frozen_models_with_separate_layouts(stories, tmp_path, monkeypatch, text, frozen):
    # With equal models, rounding decides which reward is better.
    monkeypatch.setattr(test_base, "UNEQUAL", (*test_base.UNEQUAL, "accuracies"))
    path = tmp_path / "reward"
    if "reward" in frozen:
        run_ranks(save_reward_model, 1, stories, path)
    options = SIZES | (RECORDED if "dp" in text else {}) | {"max_steps": 2, "eval_strategy": "no"}
    options["rewards_of"] = {"path": functools.partial(get_path, path)} if "reward" in frozen else {"path": get_vowels}
    layout = make_frozen_layout(text, **frozen)
    compare(stories, tmp_path, layout, GRPOTrainer, prompts, **ROUNDING, **options)
    if "reward" not in frozen:
        compare(stories, tmp_path, layout, DPOTrainer, preferences, max_steps=2, eval_steps=2)


def get_path(value, path, config):
    return str(value)


def get_vowels(path, config):
    return vowels


def save_reward_model(stories, path):
    reward_model(stories, None).save_pretrained(path)
    AutoTokenizer.from_pretrained(stories).save_pretrained(path)


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        ({"referee": {}}, "frozen_models has 'referee'; valid: reference, reward, teacher"),
        ({"reference": {"zero": 3}}, "no field 'zero'"),
        ({"reference": 3}, "frozen_models = .*expected a mapping of model names to layout fields"),
        (
            {"reward": {"tp_size": 4}},
            r"frozen_models\['reward'\]: its 4 ranks per replica .* 2 ranks per replica of the trained model",
        ),
    ],
)
def test_invalid_frozen_model_layouts_raise(frozen, message):
    with pytest.raises(ConfigError, match=message):
        MegatronConfig(tp_size=2, frozen_models=frozen)
