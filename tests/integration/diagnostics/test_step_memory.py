"""Tests of the memory that ranks use in a step, compared with its plan, and of out-of-memory reports."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.off_stage import local_named_parameters
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.diagnostics.memory_snapshot import MemorySnapshot, is_oom_error
from hf_megatron.diagnostics.step_memory import StepMemory, memory_in
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.watches import MemoryCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.planner.memory_report import memory_table, plan_for
from hf_megatron.planner.uniform_routing import balanced_experts

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
LLAMA = LlamaConfig(**SIZES, intermediate_size=96, num_hidden_layers=4)
EXPERTS = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=32, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=16
)
LAYOUTS = {
    "tp2": (LLAMA, {"tp_size": 2}),
    "tp2+sp": (LLAMA, {"tp_size": 2, "sequence_parallel": True}),
    "pp2": (LLAMA, {"pp_size": 2, "num_microbatches": 4}),
    "pp2+zbv": (LLAMA, {"pp_size": 2, "num_microbatches": 4, "pipeline_schedule": "zbv"}),
    "dp2+zero2": (LLAMA, {"dp_size": 2, "zero_stage": 2}),
    "cp2": (LLAMA, {"cp_size": 2}),
    "dp2+ep2": (EXPERTS, {"dp_size": 2, "ep_size": 2}),
    "tp2+recompute": (LLAMA, {"tp_size": 2, "recompute": "full"}),
}
LEAK = 3 * 2**20


def _step(model, optimizer):
    state = parallel_state(model)
    ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0)).to(model.device)
    rows = ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _measure_on_rank(config, sizes, folder):
    dtype = torch.bfloat16 if config is EXPERTS else torch.float32
    with balanced_experts():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, megatron_config=ConfigUnderTest(**sizes)).train()
        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            _step(model, optimizer)
        with StepMemory(folder / "step", model, optimizer):
            _step(model, optimizer)
        # A leak: the loop keeps a tensor per call, like a list of outputs.
        tensors = []

        @shard_safe
        def keep(*args):
            tensors.append(torch.zeros(LEAK, dtype=torch.uint8))

        # Off-stage modules have no local weights.
        name = next(name for name, _ in local_named_parameters(model) if name.endswith("input_layernorm.weight"))
        hook = model.get_submodule(name.rpartition(".")[0]).register_forward_hook(keep)
        with StepMemory(folder / "leak", model, optimizer):
            _step(model, optimizer)
        hook.remove()
        return len(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_matches_plan(layout, tmp_path):
    config, sizes = LAYOUTS[layout]
    leaks = run_ranks(lambda: _measure_on_rank(config, sizes, tmp_path), 2)
    records = memory_in(tmp_path / "step")
    planned = {one.pipeline_rank: one for one in plan_for(records[0])}
    for one in records:
        plan = planned[one.pipeline_rank]
        for name in ("weights", "gradients", "main weights", "moments", "recv_buffer"):
            assert one.kept.get(name, 0) == plan.kept.get(name, 0), name
        # gloo's threads release some tensors late.
        assert one.peak == pytest.approx(plan.peak.size, rel=0.05)
        assert sum(one.at_peak.values()) == one.peak
    assert "+0.0%" in memory_table(records, [*planned.values()])
    for one, before, leak in zip(memory_in(tmp_path / "leak"), records, leaks, strict=True):
        # gloo may release other tensors late in one of the two steps.
        assert leak * LEAK * 0.4 < one.peak - before.peak <= leak * LEAK + 0.05 * before.peak
    result = CliRunner().invoke(app, ["debug", "memory", str(tmp_path / "leak")])
    assert result.exit_code == 0, result.output
    assert "peak of the step" in result.output


def test_models_without_plan(tmp_path):
    def on_rank():
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2)).train()
        model.model.embed_tokens.requires_grad_(False)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = prepare_optimizer(torch.optim.AdamW(trainable))
        with StepMemory(tmp_path, model, optimizer):
            _step(model, optimizer)
        with pytest.raises(ConfigError, match="already has a record"):
            StepMemory(tmp_path, model, optimizer)

    run_ranks(on_rank, 2)
    result = CliRunner().invoke(app, ["debug", "memory", str(tmp_path)])
    assert "no planned memory: some parameters are frozen" in result.output
    with pytest.raises(ConfigError, match="loaded with megatron_config"):
        StepMemory(tmp_path, AutoModelForCausalLM.from_config(LLAMA), None)
    with pytest.raises(ConfigError, match="has no file rank"):
        memory_in(tmp_path / "nowhere")


def test_trainer(tmp_path):
    def on_rank():
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
        rows = [{"input_ids": [place] * 32, "labels": [place] * 32} for place in range(8)]
        settings = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": "none", "save_strategy": "no"}
        arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, gradient_checkpointing=True, **settings)
        Trainer(model, arguments, default_data_collator, rows, callbacks=[MemoryCallback(tmp_path / "memory")]).train()

    run_ranks(on_rank, 2)
    [first, _] = memory_in(tmp_path / "memory" / "step1")
    assert (first.rows, first.length, first.layout["recompute"]) == (2, 32, "full")
    [planned] = plan_for(first)
    assert first.kept["moments"] == planned.kept["moments"]
    assert first.peak == pytest.approx(planned.peak.size, rel=0.02)
    assert plan_for(replace(first, rows=4))[0].peak.size > first.peak


def _fail_allocation_on_rank(sizes, folder):
    # Half precision gradients are read from the gradient buffer, through proxies that outlive a step.
    layout = ConfigUnderTest(**sizes)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16, megatron_config=layout).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters()))
    _step(model, optimizer)

    @shard_safe
    def allocate(module, args):
        torch.empty(1 << 50, dtype=torch.uint8)

    module_names = []
    for draw in range(20):
        rng = random.Random(f"{sizes} {draw}")
        name = rng.choice([name for name, _ in model.model.layers.named_modules() if name.count(".") == 1])
        hook = model.model.layers.get_submodule(name).register_forward_pre_hook(allocate)
        with pytest.raises(RuntimeError, match="can't allocate"), MemorySnapshot(folder / f"{draw}", model, optimizer):
            _step(model, optimizer)
        hook.remove()
        module_names.append(name)
    with pytest.raises(ZeroDivisionError), MemorySnapshot(folder / "other", model, optimizer):
        _ = 1 / 0
    return module_names


@pytest.mark.parametrize("layout", ["tp2", "cp2", "dp2"])
def test_oom_report_names_the_module(layout, tmp_path):
    names, _ = run_ranks(lambda: _fail_allocation_on_rank({f"{layout[:2]}_size": 2}, tmp_path), 2)
    for draw, name in enumerate(names):
        for rank in range(2):
            record = json.loads((tmp_path / str(draw) / f"rank{rank:05}.json").read_text("utf-8"))
            # The hook is called from the frame of the module itself or of the module that contains it.
            assert f"model.layers.{name}".startswith(record["where"].partition(" ")[0]), (record["where"], name)
            assert record["bytes"]["weights"] > 0
            assert record["largest"][0]["bytes"] >= record["largest"][-1]["bytes"] > 0
            assert "tried to allocate 1125899906842624 bytes" in record["error"]
    assert not (tmp_path / "other").exists()


def test_is_oom_error():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise ValueError("in a callback") from error
    except ValueError as error:
        assert is_oom_error(error)
    assert not is_oom_error(ValueError("shape"))
