"""Tests of step traces on layouts of all axes: sleeping ranks, ranks that wait for them, and the merged timeline."""

import json
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.compat.torch_autograd import dispatch_modes
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.diagnostics.kernel_spans import with_kernels
from hf_megatron.diagnostics.rank_trace import Communication, RankTrace, traces_in
from hf_megatron.diagnostics.step_memory import memory_in
from hf_megatron.diagnostics.step_trace import StepTrace
from hf_megatron.diagnostics.trace_breakdown import compute_shares, write_merged
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.run import RunCallback
from hf_megatron.integrations.trainer.callbacks.traces import TraceCallback
from hf_megatron.integrations.trainer.callbacks.watches import (
    MemoryCallback,
    NonFiniteCallback,
    RecordStepCallback,
    StragglerCallback,
)
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=4)
EXPERTS = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=8
)
# Config, layout, and the axes along which ranks communicate.
LAYOUTS = {
    "tp2": (LLAMA, {"tp_size": 2}, {"tp"}),
    "tp2+sp": (LLAMA, {"tp_size": 2, "sequence_parallel": True}, {"tp"}),
    "dp2": (LLAMA, {"dp_size": 2}, {"dp"}),
    "dp2+zero3": (LLAMA, {"dp_size": 2, "zero_stage": 3}, {"dp"}),
    "cp2": (LLAMA, {"cp_size": 2}, {"cp"}),
    "pp2": (LLAMA, {"pp_size": 2, "num_microbatches": 2}, {"pp"}),
    "dp2+ep2": (EXPERTS, {"dp_size": 2, "ep_size": 2}, {"dp", "ep"}),
    "tp2+pp2": (LLAMA, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, {"tp", "pp"}),
    "tp2+dp2": (LLAMA, {"tp_size": 2, "dp_size": 2}, {"tp", "dp"}),
}
NAP, DRAWS = 0.2, 3


class Naps:
    """Sleeps of a rank in a hook, each started once another rank waits for this one, independent of timing.

    Args:
        trace: step trace of this rank.
        folder: shared folder, in which each rank writes the call that it waits in.
    """

    def __init__(self, trace, folder):
        self.trace, self.folder = trace, folder
        self.file = folder / f"waits{trace.rank}.json"
        self.taken = []
        self._timed, trace._timed = trace._timed, self._report

    def _report(self, function, made):
        """Writes the call that this rank waits in; the first timed part of a call starts it and is not written."""

        def inside():
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps([made.axis, made.ranks, made.number]), "utf-8")
            partial.replace(self.file)
            try:
                return function()
            finally:
                self.file.unlink()

        return self._timed(inside if made.waits else function, made)

    def _is_waited_for(self):
        for file in self.folder.glob("waits*.json"):
            try:
                axis, ranks, number = json.loads(file.read_text("utf-8"))
            except FileNotFoundError:
                continue
            # No gloo call ends before all of its ranks have joined, sends included.
            if self.trace.rank in ranks and number >= self.trace._counts[axis, tuple(ranks)]:
                return True
        return False

    @shard_safe
    def nap(self, *args):
        until = time.monotonic() + 100
        while not self._is_waited_for():
            assert time.monotonic() < until, "no rank waits for this one"
            time.sleep(0.002)
        began = time.time()
        time.sleep(NAP)
        self.taken.append((began, time.time()))


def _step(model, optimizer):
    state = parallel_state(model)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    rows = ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _trace_on_rank(config, sizes, folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, megatron_config=ConfigUnderTest(**sizes)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    _step(model, optimizer)
    slept = []
    for draw in range(DRAWS):
        rng = random.Random(f"{sizes} {draw}")
        layer, rank = rng.randrange(config.num_hidden_layers), rng.randrange(dist.get_world_size())
        name, state = f"model.layers.{layer}", parallel_state(model)
        if state.cut is not None:
            # Move the rank to the stage that has the layer.
            rank += (state.cut.owner(f"{name}.") - state.axes.of_rank(rank).rank("pp")) * sizes.get("tp_size", 1)
        with StepTrace(folder / str(draw), model, optimizer) as trace:
            naps = Naps(trace, folder)
            hook = model.get_submodule(name).mlp.register_forward_hook(naps.nap) if rank == dist.get_rank() else None
            _step(model, optimizer)
        if hook is not None:
            hook.remove()
        slept.append((rank, name, naps.taken))
    return slept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_waits_name_the_sleeping_rank(layout, tmp_path):
    config, sizes, axes = LAYOUTS[layout]
    ranks = 4 if layout in ("tp2+pp2", "tp2+dp2") else 2
    slept = run_ranks(lambda: _trace_on_rank(config, sizes, tmp_path), ranks)
    for draw in range(DRAWS):
        rank = slept[0][draw][0]
        _, name, naps = slept[rank][draw]
        traces = traces_in(tmp_path / str(draw))
        shares = compute_shares(traces)
        assert axes <= set(shares[0].communicating) <= {*axes, "job", "dp_cp", "dp_shard"}
        # Ranks may also wait through chains of other ranks, so one of them is enough.
        waited = {one.rank: one.waited_for[rank] for one in shares if one.rank != rank}
        assert naps and max(waited.values()) >= NAP, (draw, rank, waited)
        for start, stop in naps:
            # During its sleep the rank is computing in the layer, and waits for no other rank.
            [label] = [label for label, since, until in traces[rank].computed if since <= start and stop <= until]
            assert label == f"forward {name}"
            waits = [wait for call in traces[rank].communications for wait in call.waits]
            assert all(end <= start or stop <= begin for begin, end in waits)
        for one in shares:
            parts = one.computing + sum(one.communicating.values()) + sum(one.waiting.values())
            assert parts == pytest.approx(one.step, abs=1e-5)


def test_merged_trace(tmp_path):
    """Two ranks: the second one joins the all-reduce 0.3 s late, and its clock is 5 s ahead."""
    calls = [Communication("tp", "allreduce", (0, 1), 0, 1.0, [(1.0, 1.4)])]
    late = [Communication("tp", "allreduce", (0, 1), 0, 6.3, [(6.3, 6.4)])]
    RankTrace(0, 2, "tp2", 0.0, 0.0, 2.0, [("forward", 0.0, 1.0), ("backward", 1.4, 2.0)], calls).write(tmp_path)
    RankTrace(1, 2, "tp2", 5.0, 5.0, 7.0, [("forward", 5.0, 6.3), ("backward", 6.4, 7.0)], late).write(tmp_path)
    first, second = compute_shares(traces_in(tmp_path))
    assert (first.waiting["tp"], first.communicating["tp"]) == pytest.approx((0.3, 0.1))
    assert (second.waiting["tp"], second.communicating["tp"]) == pytest.approx((0.0, 0.1))
    assert first.waited_for[1] == pytest.approx(0.3)
    assert not second.waited_for
    result = CliRunner().invoke(app, ["debug", "trace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "rank 1, 300.0 ms" in result.output
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    [waiting] = [event for event in events if event["name"] == "tp allreduce: waits for rank 1"]
    assert (waiting["pid"], waiting["ts"], waiting["dur"]) == pytest.approx((0, 1e6, 3e5))
    (tmp_path / "rank00001.json").unlink()
    with pytest.raises(ConfigError, match="ranks 1 are missing"):
        traces_in(tmp_path)


def _make_kernel(name, ts, stop, launched, number):
    """A kernel and its launch, as Kineto writes them."""
    arguments = {"args": {"correlation": number}}
    return [
        {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": launched, "dur": 5.0, **arguments},
        {"cat": "kernel", "name": name, "ts": ts, "dur": stop - ts, **arguments},
    ]


def test_kernels_on_accelerator():
    """Communication hidden by computation is separated from exposed communication."""
    traces = []
    for rank, arrives in ((0, 100.0), (1, 400.0)):
        events = [
            *_make_kernel("void gemm<float>(int)", 0.0, 300.0, 0.0, 1),
            *_make_kernel("ncclDevKernel_AllGather", arrives, 600.0, 20.0, 2),
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0},
        ]
        profile = {"traceEvents": events, "baseTimeNanoseconds": 10**9}
        # A call on the host only; then the call of the kernel, for which the host waited as well.
        calls = [
            Communication("tp", "allgather", (0, 1), 3, 1.000001, [(1.000001, 1.000002)]),
            Communication("dp", "allgather_base", (0, 1), 7, 1.00001, [(1.00001, 1.00004), (1.0003, 1.0004)]),
        ]
        host = RankTrace(rank, 2, "", 0.0, 1.0, 1.0005, [("forward", 1.0, 1.0005)], calls)
        traces.append(with_kernels(profile, host))
    [call] = traces[0].communications
    assert (call.axis, call.operation, call.ranks, call.number) == ("dp", "allgather_base", (0, 1), 7)
    assert [span[0] for span in traces[0].computed] == ["gemm"]
    first, second = compute_shares(traces)
    assert first.computing == pytest.approx(3e-4)
    assert first.hidden["dp"] == pytest.approx(2e-4)
    assert (first.waiting["dp"], first.communicating["dp"]) == pytest.approx((1e-4, 2e-4))
    assert (second.waiting["dp"], second.communicating["dp"]) == pytest.approx((0.0, 2e-4))


def test_kernels_for_send_and_receive():
    """A send and a receive in one batch share a kernel, started after both calls; a long call has several kernels."""
    calls = [
        Communication("pp", "send", (0, 1), 0, 1.00001, [(1.00001, 1.00002)]),
        Communication("pp", "recv", (1, 0), 0, 1.00002, [(1.00002, 1.00003)]),
        Communication("tp", "allreduce", (0, 2), 0, 1.0001, [(1.0001, 1.0002)]),
        Communication("pp", "send", (0, 1), 1, 1.0003, [(1.0003, 1.0004)]),
    ]
    events = [
        *_make_kernel("ncclDevKernel_SendRecv", 50.0, 90.0, 40.0, 1),
        *_make_kernel("ncclDevKernel_AllReduce", 150.0, 160.0, 110.0, 2),
        *_make_kernel("ncclDevKernel_AllReduce", 160.0, 170.0, 120.0, 3),
        *_make_kernel("ncclDevKernel_SendRecv", 400.0, 410.0, 350.0, 4),
    ]
    host = RankTrace(0, 3, "", 0.0, 1.0, 1.0005, [], calls)
    communications = with_kernels({"traceEvents": events[::-1], "baseTimeNanoseconds": 10**9}, host).communications
    assert [(call.axis, call.operation, call.number, len(call.waits)) for call in communications] == [
        ("pp", "send", 0, 1),
        ("pp", "recv", 0, 1),
        ("tp", "allreduce", 0, 2),
        ("pp", "send", 1, 1),
    ]
    assert [call.start for call in communications] == pytest.approx([1.00005, 1.00005, 1.00015, 1.0004])


def _train_on_rank(folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
    rows = [{"input_ids": [place] * 8, "labels": [place] * 8} for place in range(8)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, **settings)
    trainer = Trainer(model, arguments, default_data_collator, rows, callbacks=[TraceCallback(folder / "traces", [1])])
    trainer.train()


def test_trainer(tmp_path):
    run_ranks(lambda: _train_on_rank(tmp_path), 2)
    traces = traces_in(tmp_path / "traces" / "step1")
    assert {"optimizer", "forward model.layers.3", "backward model.layers.0"} <= {
        span[0] for span in traces[0].computed
    }
    write_merged(traces, tmp_path / "merged.json")


class _Broken(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.model.layers[1].register_forward_pre_hook(shard_safe(lambda *called: 1 // 0))


def _fail_on_rank(folder):
    """Runs all diagnostic tools while a step ends in an error."""
    original_methods = _current_methods()
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
    rows = [{"input_ids": [place] * 8, "labels": [place] * 8} for place in range(8)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, **settings)
    hooks = len(model._forward_pre_hooks)
    tools = [
        TraceCallback(folder / "traces", [1]),
        NonFiniteCallback(),
        StragglerCallback(),
        RecordStepCallback(folder / "recorded", [1]),
        RunCallback(folder / "run", memory_step=1, trace_step=None),
        _Broken(),
    ]
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        Trainer(model, arguments, default_data_collator, rows, callbacks=tools).train()
    assert _current_methods() == original_methods and dispatch_modes() == []
    assert threading.active_count() <= threads and len(model._forward_pre_hooks) == hooks
    return sorted(path.name for path in folder.rglob("rank*"))


def test_error_stops_all_tools(tmp_path):
    assert run_ranks(_fail_on_rank, 2, tmp_path) == [[], []]


def _current_methods():
    return [vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"]]


def _trace_twice_on_rank(folder):
    """Two traces overlap and end in the order in which they started."""
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(tp_size=2)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    original_methods = _current_methods()
    first, second = StepTrace(folder / "first", model, optimizer), StepTrace(folder / "second", model, optimizer)
    first.__enter__()
    second.__enter__()
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits.sum().backward()
    first.__exit__(None, None, None)
    dist.all_reduce(torch.ones(1))
    second.__exit__(None, None, None)
    assert _current_methods() == original_methods
    with pytest.raises(ZeroDivisionError), StepTrace(folder / "ended", model, optimizer):
        _ = 1 / 0
    assert _current_methods() == original_methods


def test_overlapping_traces(tmp_path):
    run_ranks(lambda: _trace_twice_on_rank(tmp_path), 2)
    first, second = (traces_in(tmp_path / name)[0] for name in ("first", "second"))
    # The second trace records the communication of the first; the first records nothing after its own end.
    assert first.communications[-1].start < first.stop < second.communications[-1].start
    assert not list(tmp_path.glob("ended/*"))


class _Fails(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise OverflowError("as when memory ends")


def _retrain_on_rank(folder):
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
    rows = [{"input_ids": [place] * 8, "labels": [place] * 8} for place in range(8)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, **settings)
    tools = [TraceCallback(folder / "traces", [1]), MemoryCallback(folder / "memory", [1])]
    failing = _Fails()
    trainer = Trainer(model, arguments, default_data_collator, rows, callbacks=[*tools, failing])
    original_methods = _current_methods()
    with pytest.raises(OverflowError):
        trainer.train()
    trainer.remove_callback(failing)
    trainer.train()
    assert _current_methods() == original_methods


def test_failed_step_is_traced_on_retry(tmp_path):
    """Training continues after an error, as with `auto_find_batch_size`; the step is traced when it is repeated."""
    run_ranks(lambda: _retrain_on_rank(tmp_path), 2)
    assert len(traces_in(tmp_path / "traces" / "step1")) == len(memory_in(tmp_path / "memory" / "step1")) == 2
    with pytest.raises(ConfigError, match=r"TraceCallback\(steps=\[-1\]\): expected optimizer steps"):
        TraceCallback(tmp_path, [-1])


def test_single_process(tmp_path):
    model = AutoModelForCausalLM.from_config(LLAMA)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with StepTrace(tmp_path, model):
        model(input_ids=ids, labels=ids).loss.backward()
    [trace] = traces_in(tmp_path)
    assert trace.communications == []
    assert "backward model.layers.3" in {span[0] for span in trace.computed}
    with pytest.raises(ConfigError, match="already has a trace"):
        StepTrace(tmp_path, model)
