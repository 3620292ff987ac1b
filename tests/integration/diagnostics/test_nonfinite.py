"""Tests of the first non-finite value of a step, found by repeating its calls: random faults on layouts of all axes."""

import random

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.off_stage import local_named_parameters
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.diagnostics.nonfinite import NonFiniteWatch
from hf_megatron.diagnostics.rank_trace import traces_in
from hf_megatron.diagnostics.recording import StepRecorder
from hf_megatron.diagnostics.step_memory import StepMemory, memory_in
from hf_megatron.diagnostics.step_trace import StepTrace
from hf_megatron.diagnostics.throughput import Throughput
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.watches import NonFiniteCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=4)
EXPERTS = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=8
)
LAYOUTS = [
    (LLAMA, {"tp_size": 2, "dp_size": 2}),
    (LLAMA, {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2}),
    (LLAMA, {"pp_size": 2, "dp_size": 2, "num_microbatches": 2}),
    (LLAMA, {"pp_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b", "num_microbatches": 2}),
    (LLAMA, {"cp_size": 2, "dp_size": 2}),
    (LLAMA, {"dp_size": 2, "zero_stage": 3}),
    (EXPERTS, {"dp_size": 4, "ep_size": 2}),
]
# Modules of a layer that are called on every rank that has it.
PARTS = ["input_layernorm", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn", "mlp"]


class Poison:
    """Makes the output of a module NaN, or the gradient of its output infinite, once it is started."""

    def __init__(self, module, kind, microbatch, *, once=False):
        self.kind, self.microbatch, self.once = kind, microbatch, once
        self.calls, self.is_on = 0, False
        module.register_forward_hook(shard_safe(lambda *called: self(*called)))

    def start(self):
        self.is_on, self.calls = True, 0

    def __call__(self, module, args, output):
        if not self.is_on:
            return None
        call, self.calls = self.calls, self.calls + 1
        if call != self.microbatch:
            return None
        self.is_on = not self.once
        first, *others = output if isinstance(output, tuple) else (output,)
        if self.kind == "output":
            first = first.clone()
            local_tensor(first).view(-1)[0] = float("nan")
        else:
            # Below the hooks that inspect this output.
            first = _InfiniteGradient.apply(first)
        return (first, *others) if isinstance(output, tuple) else first


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("inf"))


def _step(model, optimizer, calls=1):
    state = parallel_state(model)
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    rows = ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    for part in rows.chunk(calls):
        model(input_ids=part, labels=part).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _load_model(config, sizes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, megatron_config=ConfigUnderTest(**sizes)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return model, optimizer


def _find_nonfinite_on_rank(config, sizes, seeds):
    """Returns for each seed what was poisoned and what was reported."""
    model, optimizer = _load_model(config, sizes)
    state, world = parallel_state(model), dist.get_world_size()
    weights = {name: parameter.detach().clone() for name, parameter in local_named_parameters(model)}
    results = []
    for seed in seeds:
        watch = NonFiniteWatch(model, optimizer, say=lambda report: None)
        _step(model, optimizer)
        assert watch.reports == []
        rng = random.Random(seed)
        kind = rng.choice(["output", "gradient"])
        layer, part, rank = rng.randrange(config.num_hidden_layers), rng.choice(PARTS), rng.randrange(world)
        microbatch = rng.randrange(2) if state.pipeline is not None else 0
        name = f"model.layers.{layer}.{part}"
        has_it = state.cut is None or state.cut.owner(f"{name}.") == state.mesh.pp_rank
        stage = 0 if state.cut is None else state.cut.stage_of(f"{name}.")
        poison = Poison(model.get_submodule(name), kind, microbatch) if rank == dist.get_rank() and has_it else None
        if poison is not None:
            poison.start()
            # The rerun calls the model again.
            model.register_forward_pre_hook(lambda *args, poison=poison: poison.start() if poison.is_on else None)
        _step(model, optimizer)
        if poison is not None:
            poison.is_on = False
        watch.stop()
        results.append((poison is not None, (kind, name, rank, microbatch, stage), watch.reports))
        with torch.no_grad():
            for name, parameter in local_named_parameters(model):
                parameter.copy_(weights[name])
    return results


def _layout_id(value):
    return MegatronConfig(**value).layout() if isinstance(value, dict) else value.model_type


@pytest.mark.parametrize(("config", "sizes"), LAYOUTS, ids=_layout_id)
def test_modules_are_named(config, sizes):
    layout = MegatronConfig(**sizes)
    ranks = run_ranks(
        _find_nonfinite_on_rank, layout.ranks_per_replica * (layout.dp_size or 1), config, sizes, range(20)
    )
    poisoned = 0
    for number, trials in enumerate(zip(*ranks, strict=True)):
        (_, fault, reports) = trials[0]
        assert all(other[2] == reports for other in trials)
        if not any(is_poisoned for is_poisoned, *_ in trials):
            # The rank that was drawn does not hold the layer.
            assert reports == [], number
            continue
        poisoned += 1
        [report] = reports
        kind, name, rank, microbatch, stage = fault
        one = report.first
        assert rank in report.ranks and (one.microbatch, one.stage, one.call) == (microbatch, stage, 0), report
        if kind == "output":
            assert report.ranks == (rank,)
            assert (one.kind, one.name) == (kind, name), (report, fault)
        else:
            # The input of the module gets the infinite gradient, and is reported with the module as `after`.
            assert one.kind.startswith("gradient"), (report, fault)
            projections = {f"model.layers.{name.split('.')[2]}.self_attn.{part}_proj" for part in "qkv"}
            assert one.after in (projections if name in projections else {name}), (report, fault)
    assert poisoned >= 5


def _poison_weights_on_rank(config, sizes, seeds):
    model, optimizer = _load_model(config, sizes)
    results = []
    for seed in seeds:
        watch = NonFiniteWatch(model, optimizer, say=lambda report: None)
        rng, rank = random.Random(seed), random.Random(seed).randrange(dist.get_world_size())
        changed = None
        if dist.get_rank() == rank:
            named = {
                n: p for n, p in local_named_parameters(model) if "experts" in n or "norm" not in n and "embed" not in n
            }
            name = rng.choice(sorted(named))
            local = local_tensor(named[name]).detach()
            entry = rng.randrange(local.numel())
            before = float(local.view(-1)[entry])
            local.view(-1)[entry] = float("nan")
            changed = name, entry
        _step(model, optimizer)
        if changed is not None:
            local.view(-1)[entry] = before
        watch.stop()
        results.append((rank, changed, watch.reports))
    return results


def test_expert_weight_is_named_with_its_index():
    ranks = run_ranks(
        _poison_weights_on_rank, 4, EXPERTS, {"dp_size": 4, "ep_size": 2, "max_skipped_steps": 100}, range(20)
    )
    for trials in zip(*ranks, strict=True):
        rank, _, [report] = trials[0]
        name, entry = trials[rank][1]
        assert (report.first.kind, report.first.name, report.first.rank) == ("weight", name, rank)
        if "experts" in name:
            # The ep rank is the inner half of the dp rank and has half of the experts.
            per_rank = 2
            assert report.first.entry[0] // per_rank == rank % 2
            assert f"weight {name} at [{report.first.entry[0]}, " in str(report)


def test_unreproduced_nan_is_a_hardware_fault():
    def on_rank():
        model, optimizer = _load_model(LLAMA, {"tp_size": 2})
        watch, messages = None, []
        watch = NonFiniteWatch(model, optimizer, say=messages.append)
        poison = Poison(model.model.layers[1].mlp, "output", 0, once=True)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        if dist.get_rank() == 1:
            poison.start()
        _step(model, optimizer)
        same = all(torch.equal(one, other) for one, other in zip(start, model.parameters(), strict=True))
        _step(model, optimizer)
        return [str(report) for report in watch.reports], len(messages), same

    for rank, (reports, message_count, same) in enumerate(run_ranks(on_rank, 2)):
        [text] = reports
        assert "step 0" in text and "finite values on all ranks: a hardware fault" in text
        assert message_count == (rank == 0) and same


def test_rerun_does_not_change_training():
    """Compares the weights after a rerun, with dropout and two calls per step, with a run without a watch."""

    def on_rank(watched):
        config = LlamaConfig(**LLAMA.to_dict() | {"attention_dropout": 0.2})
        model, optimizer = _load_model(config, {"dp_size": 2})
        watch = NonFiniteWatch(model, optimizer, say=lambda report: None) if watched else None
        poison = Poison(model.model.layers[2].mlp, "gradient", 1)
        torch.manual_seed(dist.get_rank())
        _step(model, optimizer, calls=2)
        poison.start()
        if watched:
            model.register_forward_pre_hook(lambda *args: None)
        _step(model, optimizer, calls=2)
        poison.is_on = False
        _step(model, optimizer, calls=2)
        return [parameter.detach().clone() for parameter in model.parameters()], watch and watch.reports

    plain, watched = (run_ranks(on_rank, 2, watch) for watch in (False, True))
    for (one, _), (other, _) in zip(plain, watched, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_trainer_reports(tmp_path, capfd):
    ids = torch.randint(3, 64, (32, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def train():
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(tp_size=2))
        poison = Poison(model.model.layers[1].self_attn.o_proj, "output", 0)
        original = model.register_forward_pre_hook(lambda *args: poison.start() if poison.is_on else None)

        class Starts(NonFiniteCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                poison.is_on = state.global_step == 2 and dist.get_rank() == 1

        callback = Starts()
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=4, save_strategy="no", report_to=[], use_cpu=True
        )
        Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[callback]).train()
        original.remove()
        return callback.reports

    for reports in run_ranks(train, 2):
        [report] = reports
        assert (report.step, report.first.rank, report.first.name) == (2, 1, "model.layers.1.self_attn.o_proj")
    assert (
        "step 2 (counted from 0), first non-finite value, found by repeating the calls: rank 1"
        in capfd.readouterr().out
    )


def test_unparallelized_model_is_rejected():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="loaded with megatron_config="):
        NonFiniteWatch(model, torch.optim.SGD(model.parameters()))


@shard_safe
def _return_nan_in_autocast(module, args, output):
    return output * torch.nan if torch.is_autocast_enabled("cpu") else output


def _rerun_in_autocast_on_rank():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, megatron_config=ConfigUnderTest(tp_size=2)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    watch, throughput = NonFiniteWatch(model, optimizer, say=lambda report: None), Throughput(model)
    model.model.layers[1].mlp.register_forward_hook(_return_nan_in_autocast)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return [str(report) for report in watch.reports], throughput._tokens


def test_rerun_uses_autocast_and_counts_no_tokens():
    for reports, tokens in run_ranks(_rerun_in_autocast_on_rank, 2):
        [report] = reports
        assert "output of model.layers.1.mlp" in report
        assert tokens == 16


def _record_failed_step_on_rank(sizes, folder, watched):
    """Records, traces and measures the memory of a non-finite step, with or without a rerun."""
    model, optimizer = _load_model(LLAMA, sizes)
    _step(model, optimizer)
    watch = NonFiniteWatch(model, optimizer, say=lambda report: None) if watched else None
    poison = Poison(model.model.layers[1].mlp, "output", 0) if dist.get_rank() == 0 else None
    if poison is not None:
        poison.start()
        model.register_forward_pre_hook(lambda *args: poison.start())
    with (
        StepRecorder(folder / "recorded", model, optimizer),
        StepTrace(folder / "traced", model, optimizer),
        StepMemory(folder / "counted", model, optimizer),
    ):
        _step(model, optimizer)
    assert watch is None or len(watch.reports) == 1


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}], ids=_layout_id)
def test_rerun_is_not_recorded(tmp_path, sizes):
    for watched in (False, True):
        run_ranks(_record_failed_step_on_rank, 2, sizes, tmp_path / str(watched), watched)
    plain, rerun = tmp_path / "False", tmp_path / "True"
    for rank in range(2):
        files = [load_file(folder / "recorded" / f"rank{rank:05}.safetensors") for folder in (plain, rerun)]
        assert files[0].keys() == files[1].keys()
        for name, tensor in files[0].items():
            torch.testing.assert_close(files[1][name], tensor, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(memory_in(plain / "counted"), memory_in(rerun / "counted"), strict=True):
        # gloo releases some tensors late.
        assert other.peak == pytest.approx(one.peak, rel=0.1)
        assert other.layers == pytest.approx(one.layers, rel=0.1)
    for one, other in zip(traces_in(plain / "traced"), traces_in(rerun / "traced"), strict=True):
        # Ranks communicate to agree on the rerun.
        assert len(one.communications) <= len(other.communications) <= len(one.communications) + 3
