"""Tests of the debugging tools on a GPU: kernels, allocator and collectives; skipped without a GPU.

    PYTORCH_NVML_BASED_CUDA_CHECK=1 pytest tests/integration/diagnostics/test_gpu.py

As in tests/integration/test_gpu.py, ranks are forked from this process, and share GPUs if there are fewer GPUs.
"""

import contextlib
import json
import time
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator

from hf_megatron import MegatronConfig
from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.diagnostics.divergence import compare_recordings
from hf_megatron.diagnostics.hang import read_flight_records, tell_hang
from hf_megatron.diagnostics.memory_snapshot import MemorySnapshot
from hf_megatron.diagnostics.rank_trace import traces_in
from hf_megatron.diagnostics.step_memory import StepMemory, memory_in
from hf_megatron.diagnostics.step_trace import StepTrace
from hf_megatron.diagnostics.stragglers import StragglerWatch
from hf_megatron.diagnostics.trace_breakdown import compute_shares, write_merged
from hf_megatron.errors import RankError
from hf_megatron.integrations.trainer.callbacks.throughput import ThroughputCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.planner.memory_report import memory_table, plan_for
from tests.integration.diagnostics import test_divergence, test_nonfinite, test_replica_check, test_step_trace
from tests.integration.test_gpu import forks_can_use_the_gpu  # noqa: F401  (a fixture)

pytestmark = pytest.mark.gpu

# Large enough that the tensors of a step exceed the extra allocations of libraries.
LLAMA = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
LAYOUTS = {
    "tp2": ({"tp_size": 2}, "tp"),
    "tp2+sp": ({"tp_size": 2, "sequence_parallel": True}, "tp"),
    "pp2": ({"pp_size": 2, "num_microbatches": 2}, "pp"),
    "cp2": ({"cp_size": 2}, "cp"),
    "dp2+zero2": ({"dp_size": 2, "zero_stage": 2}, "dp"),
    "dp2+zero3": ({"dp_size": 2, "zero_stage": 3}, "dp"),
}
# Device clock cycles: about a tenth of a second.
CYCLES, SECONDS = 200_000_000, 0.1
# Workspace of cuBLAS on current devices, and small allocations of other libraries.
WORKSPACE = 96 * 2**20
TIMEOUT = 15.0


@shard_safe
def _nap(*args):
    torch.cuda._sleep(CYCLES)


def _load(sizes, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=dtype, megatron_config=ConfigUnderTest(**sizes)).train()
    return model, prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def _step(model, optimizer):
    state = parallel_state(model)
    ids = torch.randint(0, 8192, (4, 512), generator=torch.Generator().manual_seed(0)).to(model.device)
    rows = ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _trace_on_rank(sizes, folder):
    model, optimizer = _load(sizes)
    for _ in range(2):
        _step(model, optimizer)
    state = parallel_state(model)
    is_slow = torch.distributed.get_rank() == 1
    layer = 0 if state.cut is None else 3
    if is_slow:
        model.get_submodule(f"model.layers.{layer}").mlp.register_forward_hook(_nap)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    with StepTrace(folder, model, optimizer):
        _step(model, optimizer)
        torch.cuda.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_waits_name_the_slow_device(layout, tmp_path):
    sizes, axis = LAYOUTS[layout]
    run_ranks(_trace_on_rank, 2, sizes, tmp_path, device="cuda")
    traces = traces_in(tmp_path)
    first, second = compute_shares(traces)
    details = f"{[asdict(one) for one in (first, second)]}"
    assert axis in first.communicating and set(first.communicating) <= {axis, "job", "dp_cp", "dp_shard"}, details
    # Ranks that share a device wait for each other's time slices as well.
    assert first.waited_for.get(1, 0) > 0.5 * SECONDS, details
    assert any("gemm" in name or "nvjet" in name or "cutlass" in name for name, *_ in traces[0].computed), details
    longest = max(traces[1].computed, key=lambda span: span[2] - span[1])
    assert "spin" in longest[0], longest
    for one in (first, second):
        parts = one.computing + sum(one.communicating.values()) + sum(one.waiting.values())
        assert parts <= one.step * 1.02, details
    write_merged(traces, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]


def _measure_memory_on_rank(sizes, folder):
    model, optimizer = _load(sizes)
    for _ in range(2):
        _step(model, optimizer)
    with StepMemory(folder, model, optimizer):
        _step(model, optimizer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_matches_plan(layout, tmp_path):
    run_ranks(_measure_memory_on_rank, 2, LAYOUTS[layout][0], tmp_path, device="cuda")
    records = memory_in(tmp_path)
    plans = {one.pipeline_rank: one for one in plan_for(records[0])}
    table = memory_table(records, [*plans.values()])
    print(layout, [(one.peak, plans[one.pipeline_rank].peak.size, one.allocator) for one in records])
    for one in records:
        plan = plans[one.pipeline_rank]
        for name in ("weights", "gradients", "main weights", "moments"):
            assert one.kept.get(name, 0) == plan.kept.get(name, 0), (name, table)
        assert one.peak == pytest.approx(plan.peak.size, rel=0.05), table
        assert 0.97 * one.peak < one.allocator["peak"] < 1.05 * one.peak + WORKSPACE, (one.allocator, table)


@pytest.mark.parametrize("layout", ["tp2", "dp2+zero3"])
def test_oom_report_names_the_module(layout, tmp_path):
    def on_rank():
        model, optimizer = _load(LAYOUTS[layout][0])
        _step(model, optimizer)

        @shard_safe
        def allocate(module, args):
            torch.empty(1 << 44, dtype=torch.uint8, device="cuda")

        model.model.layers[2].mlp.register_forward_pre_hook(allocate)
        with pytest.raises(torch.OutOfMemoryError), MemorySnapshot(tmp_path, model, optimizer):
            _step(model, optimizer)

    run_ranks(on_rank, 2, device="cuda")
    for rank in range(2):
        record = json.loads((tmp_path / f"rank{rank:05}.json").read_text("utf-8"))
        assert record["where"].startswith("model.layers.2"), record
        assert record["bytes"]["weights"] > 0 and record["bytes"]["moments"] > 0, record
        assert record["allocator"]["num_ooms"] > 0
        assert (tmp_path / f"rank{rank:05}.pickle").stat().st_size > 0


def test_nccl_hang(tmp_path, monkeypatch):
    """One rank hangs in a layer: the kernels of the other rank stall, and its host when it reads a value."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "nccl"))

    @shard_safe
    def sleep(*args):
        time.sleep(TIMEOUT + 10)

    def on_rank():
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2, timeout=TIMEOUT))
        ids = torch.zeros(2, 8, dtype=torch.int64, device=model.device)
        model(input_ids=ids, labels=ids).loss.item()
        if torch.distributed.get_rank() == 1:
            model.model.layers[1].mlp.register_forward_hook(sleep)
        model(input_ids=ids, labels=ids).loss.item()

    # NCCL's own watchdog ends a process some time after the timeout.
    with contextlib.suppress(RankError):
        run_ranks(on_rank, 2, timeout=90, device="cuda")
    text = tell_hang(read_flight_records(tmp_path))
    assert "rank 1 did not reach collective" in text, text


def test_device_slowdown_is_detected():
    """Ranks alone in their stages are compared with their past; extra work then slows the device of one rank."""

    def on_rank():
        model, optimizer = _load(LAYOUTS["pp2"][0])
        watch = StragglerWatch(model, optimizer, steps=4, windows=3)
        for _ in range(40):
            _step(model, optimizer)
        clean, other = list(watch.reports), torch.cuda.Stream()
        one = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
        for _ in range(24):
            if torch.distributed.get_rank() == 1:
                with torch.cuda.stream(other):
                    for _ in range(200):
                        torch.mm(one, one)
            _step(model, optimizer)
        watch.stop()
        return clean, watch.reports

    [(clean, reports), _] = run_ranks(on_rank, 2, device="cuda")
    assert clean == []
    # The other rank shares the device and may be reported too.
    assert 1 in {report.rank for report in reports}, reports


def test_clean_devices_raise_no_alarm():
    """Two ranks that share a device by time slicing have the noisiest step times."""

    def on_rank():
        model, optimizer = _load({"dp_size": 2})
        watch = StragglerWatch(model, optimizer, steps=10)
        for _ in range(100):
            _step(model, optimizer)
        watch.stop()
        return watch.reports

    assert run_ranks(on_rank, 2, device="cuda") == [[], []]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (test_replica_check.DRAWS, {"tp_size": 2, "dp_size": 2}),
        (test_replica_check.LLAMA, {"dp_size": 4, "zero_stage": 1}),
        (test_replica_check.EXPERTS, {"dp_size": 4, "ep_size": 2}),
    ],
    ids=["tp2+dp2", "dp4", "dp4+ep2"],
)
def test_flipped_bit_is_named(config, sizes):
    ranks = run_ranks(test_replica_check._check_flips_on_rank, 4, config, sizes, range(16), device="cuda")
    clean, trials, after = ranks[0]
    assert clean == after == []
    named = 0
    for seed, (rank, _, differences) in enumerate(trials):
        kind, name = ranks[rank][1][seed][1]
        for one in differences:
            named += 1
            assert (
                one.kind == kind
                and name in (one.name, test_replica_check._replace_tied_name(one.name))
                and rank in one.ranks
            )
    assert named >= 3


@pytest.mark.parametrize("layout", ["tp2", "dp2+zero3"])
def test_nonfinite_values_are_named(layout):
    reports = []
    for trials in zip(
        *run_ranks(
            test_nonfinite._find_nonfinite_on_rank, 2, test_nonfinite.LLAMA, LAYOUTS[layout][0], range(6), device="cuda"
        ),
        strict=True,
    ):
        _, (kind, name, rank, *_), [report] = trials[0]
        reports.append(report)
        assert rank in report.ranks
        if kind == "output":
            assert (report.first.kind, report.first.name) == (kind, name), report
    assert len(reports) == 6


@pytest.mark.parametrize("layout", ["tp2+sp", "pp2", "dp2+zero2", "cp2"])
def test_gpu_recording_matches_cpu(layout, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(test_divergence.LLAMA).save_pretrained(tmp_path / "model")
    record, sizes = test_divergence._record, LAYOUTS[layout][0]
    run_ranks(record, 1, tmp_path / "model", tmp_path / "one", None)
    run_ranks(record, 2, tmp_path / "model", tmp_path / "two", sizes, device="cuda")
    result = compare_recordings(tmp_path / "one", tmp_path / "two")
    assert result.first is None, str(result)
    fault = test_divergence._scale_output("model.layers.1.mlp", 0)
    done = run_ranks(record, 2, tmp_path / "model", tmp_path / "fault", sizes, fault, device="cuda")
    if done[0]:
        result = compare_recordings(tmp_path / "one", tmp_path / "fault").first
        assert (result.name, result.kind, result.ranks) == ("model.layers.1.mlp", "output", (0,)), str(result)


def test_mfu_is_logged(tmp_path):
    def on_rank():
        model, _ = _load({"tp_size": 1})
        rows = [{"input_ids": [place] * 512, "labels": [place] * 512} for place in range(64)]
        settings = {"per_device_train_batch_size": 8, "max_steps": 8, "report_to": "none", "save_strategy": "no"}
        arguments = TrainingArguments(str(tmp_path), logging_steps=2, **settings)
        trainer = Trainer(model, arguments, default_data_collator, rows, callbacks=[ThroughputCallback(989)])
        trainer.train()
        return [log["mfu"] for log in trainer.state.log_history if "mfu" in log]

    [shares] = run_ranks(on_rank, 1, device="cuda")
    assert len(shares) == 4 and all(0 < share < 1 for share in shares), shares


def test_small_step_traces(tmp_path):
    """Traces of consecutive steps have the same number of communications."""
    config, sizes, axes = test_step_trace.LAYOUTS["tp2+sp"]

    def on_rank():
        model = AutoModelForCausalLM.from_config(config, megatron_config=ConfigUnderTest(**sizes)).train()
        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(3):
            with StepTrace(tmp_path / str(step), model, optimizer):
                test_step_trace._step(model, optimizer)
                torch.cuda.synchronize()

    run_ranks(on_rank, 2, device="cuda")
    calls = [[len(one.communications) for one in traces_in(tmp_path / str(step))] for step in range(3)]
    assert calls[1] == calls[2] and calls[1][0] == calls[1][1] > 0, calls
    assert axes <= {call.axis for call in traces_in(tmp_path / "2")[0].communications}
