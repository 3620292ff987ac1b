"""Tests of straggler detection: only a sleeping rank is named, with its module and function, on layouts of all axes."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.diagnostics.stack_sampler import ThreadSampler
from hf_megatron.diagnostics.stragglers import SlowRanks, StepWindow, StragglerWatch
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.watches import StragglerCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=4)
EXPERTS = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=8
)
LAYOUTS = [
    (LLAMA, {"tp_size": 2}),
    (LLAMA, {"tp_size": 2, "sequence_parallel": True}),
    (LLAMA, {"dp_size": 2}),
    (LLAMA, {"cp_size": 2}),
    (LLAMA, {"pp_size": 2, "num_microbatches": 2}),
    (EXPERTS, {"dp_size": 2, "ep_size": 2}),
]
# Seconds of sleep per call: several times the duration of a step, also on a loaded machine.
NAP, STEPS, WINDOWS = 0.15, 3, 2


@shard_safe
def _nap(*args):
    time.sleep(NAP)


def _run_steps(model, optimizer, number):
    state = parallel_state(model)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    rows = ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    for _ in range(number):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _find_stragglers_on_rank(config, sizes, seeds):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, megatron_config=ConfigUnderTest(**sizes)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    _run_steps(model, optimizer, 2)
    results = []
    for seed in seeds:
        watch = StragglerWatch(
            model, optimizer, steps=STEPS, windows=WINDOWS, factor=3.0, interval=0.005, say=lambda report: None
        )
        if sizes.get("pp_size", 1) > 1:
            # A rank that is alone in its stage is compared with its own earlier windows.
            _run_steps(model, optimizer, STEPS * WINDOWS)
        assert watch.reports == []
        rng = random.Random(seed)
        layer, rank = rng.randrange(config.num_hidden_layers), rng.randrange(dist.get_world_size())
        name, state = f"model.layers.{layer}.mlp", parallel_state(model)
        if state.cut is not None:
            rank = state.cut.owner(f"{name}.")
        hook = model.get_submodule(name).register_forward_hook(_nap) if rank == dist.get_rank() else None
        _run_steps(model, optimizer, STEPS * WINDOWS)
        if hook is not None:
            hook.remove()
        watch.stop()
        results.append((rank, name, watch.reports))
    return results


def _layout_id(value):
    return MegatronConfig(**value).layout() if isinstance(value, dict) else value.model_type


@pytest.mark.parametrize(("config", "sizes"), LAYOUTS, ids=_layout_id)
def test_sleeping_rank_is_named(config, sizes):
    for trials in zip(*run_ranks(_find_stragglers_on_rank, 2, config, sizes, range(4)), strict=True):
        rank, name, [report] = trials[0]
        assert all(other == trials[0] for other in trials)
        assert report.rank == rank and report.seconds > 3 * report.usual
        assert report.place.startswith(f"{name}: ") and "_nap (test_stragglers.py:" in report.place
        assert f"rank {rank} (stage {report.stage}) is slow" in str(report) and "usual time of its stage" in str(report)


def test_one_slow_window_is_no_straggler():
    """A rank that is slow in non-consecutive windows is not named; ranks are compared within their stage."""
    ranks = SlowRanks(windows=2, factor=1.5)

    def judge_windows(*seconds):
        step_windows = [
            StepWindow(stage, value, {"here": value}) for stage, value in zip((0, 0, 1, 1), seconds, strict=True)
        ]
        return ranks.judge(step_windows, 7)

    # The last stage takes longer: it has the head.
    assert judge_windows(1, 2, 5, 5) == judge_windows(1, 1, 5, 5) == judge_windows(1, 2, 5, 5) == []
    [report] = judge_windows(1, 2, 5, 5)
    assert (report.rank, report.stage, report.usual, report.place, report.step) == (1, 0, 1, "here", 7)
    assert judge_windows(1, 2, 5, 5) == []


def test_lone_rank_is_compared_with_its_past():
    """The report names the place whose time has grown, not the place that always takes the longest."""
    ranks = SlowRanks(windows=2, factor=1.25)
    usual, slow = {"mlp": 4.0, "loading": 0.1}, {"mlp": 4.0, "loading": 2.1}
    for _ in range(3):
        assert ranks.judge([StepWindow(0, 4.1, usual)], 0) == []
    assert ranks.judge([StepWindow(0, 6.1, slow)], 0) == []
    [report] = ranks.judge([StepWindow(0, 6.1, slow)], 0)
    assert report.place == "loading"


def test_trainer_names_the_slow_rank(tmp_path, capfd):
    ids = torch.randint(3, 64, (64, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def train():
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(tp_size=2))
        if dist.get_rank() == 1:
            model.model.layers[2].self_attn.register_forward_hook(_nap)
        callback = StragglerCallback(steps=STEPS, windows=WINDOWS, factor=3.0, interval=0.005)
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=7, save_strategy="no", report_to=[], use_cpu=True
        )
        Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[callback]).train()
        return callback.reports

    for reports in run_ranks(train, 2):
        assert [(report.rank, report.place.partition(": ")[0]) for report in reports] == [
            (1, "model.layers.2.self_attn")
        ]
    assert "rank 1 (stage 0) is slow" in capfd.readouterr().out


def test_evaluation_is_not_sampled():
    model = AutoModelForCausalLM.from_config(LLAMA)
    sampler, ids = ThreadSampler(model, 0.002), torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        model(ids)
    time.sleep(0.02)
    sampler.take()
    time.sleep(0.3)
    evaluating = sum(sampler.take().values())
    # The model is still in eval mode, as after loading.
    model(ids)
    time.sleep(0.3)
    training = sum(sampler.take().values())
    sampler.stop()
    assert evaluating == 0 and training > 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [({"steps": 0}, "steps=0"), ({"windows": 0}, "windows=0"), ({"factor": 1.0}, "factor=1.0")],
)
def test_invalid_arguments_are_rejected(values, message):
    def on_rank():
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(tp_size=2))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters()))
        with pytest.raises(ConfigError, match=message):
            StragglerWatch(model, optimizer, **values)

    run_ranks(on_rank, 2)


def test_unparallelized_model_is_rejected():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="loaded with megatron_config="):
        StragglerWatch(model, torch.optim.SGD(model.parameters()))
