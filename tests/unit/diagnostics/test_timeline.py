"""Tests of pipeline timelines: spans, measured bubble, plots and the Trainer callback."""

import json
import re
import sys
import time
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hf_megatron import ConfigError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.spans import Span, SpanRecorder, Timeline, align, bubble_share, clock_offset
from hf_megatron.diagnostics.timeline import (
    draw_bars,
    gather_timeline,
    list_legend,
    to_perfetto,
    to_png,
    write_pictures,
)
from hf_megatron.testing.pipeline_timeline import draw_timeline, small_config

FORWARD, BACKWARD, START = 0.010, 0.020, 1_700_000_000.0


def simulate(ranks, microbatches):
    """Simulates 1F1B with equal stages and free communication, including waits for the adjacent stages."""
    orders = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, microbatches)
        order = [("F", index) for index in range(warmup)]
        for index in range(microbatches - warmup):
            order += [("F", warmup + index), ("B", index)]
        orders.append(order + [("B", index) for index in range(microbatches - warmup, microbatches)])
    done: dict[tuple, float] = {}
    clocks, spans = [START] * ranks, [[] for _ in range(ranks)]
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                kind, index = order[0]
                neighbour = rank - 1 if kind == "F" else rank + 1
                ready = done.get((kind, neighbour, index), None if 0 <= neighbour < ranks else START)
                if ready is None:
                    break
                order.pop(0)
                if ready > clocks[rank]:
                    wait = "receive_forward" if kind == "F" else "receive_backward"
                    spans[rank].append(Span(wait, rank, index, clocks[rank], ready))
                start = max(ready, clocks[rank])
                clocks[rank] = done[kind, rank, index] = start + (FORWARD if kind == "F" else BACKWARD)
                spans[rank].append(Span(kind, rank, index, start, clocks[rank]))
    return Timeline(spans, "1f1b", ranks, ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 8), (4, 8), (4, 3)])
def test_measured_bubble_matches_ideal_formula(ranks, microbatches):
    expected = (ranks - 1) / (ranks - 1 + microbatches)
    assert bubble_share(simulate(ranks, microbatches)) == pytest.approx(expected, abs=1e-6)


def test_bubble_counts_computation_only():
    first = [Span("F", 0, 0, 10.0, 11.0), Span("send_forward", 0, 0, 11.0, 12.0), Span("W", 0, 0, 13.0, 14.0)]
    second = [Span("F", 1, 0, 11.0, 12.0), Span("I", 1, 0, 12.0, 12.5), Span("optimizer", 1, -1, 14.0, 20.0)]
    timeline = Timeline([first, second], "any", 2, 2, 1)
    assert bubble_share(timeline) == 1 - 3.5 / (2 * 4.0)
    assert timeline.duration == 10.0


def test_empty_timeline_is_rejected():
    with pytest.raises(ConfigError, match="no forward or backward span"):
        bubble_share(Timeline([[], []], "1f1b", 2, 2, 8))
    with pytest.raises(ConfigError, match="spans of 1 ranks"):
        Timeline([[]], "1f1b", 2, 2, 8)


def test_recorder():
    synchronized = []
    recorder = SpanRecorder(lambda: synchronized.append(time.time()))
    with recorder.record("F", 1, 3):
        time.sleep(0.01)
    with pytest.raises(ValueError), recorder.record("B", 1, 3):
        raise ValueError
    [span] = recorder.spans
    assert (span.kind, span.stage, span.microbatch) == ("F", 1, 3) and span.duration >= 0.01
    assert synchronized[0] <= span.start < synchronized[1] <= span.stop
    recorder.clear()
    assert recorder.spans == ()


def test_align_moves_all_spans_by_the_offset():
    assert align((Span("F", 0, 1, 12.0, 13.0),), 2.0) == (Span("F", 0, 1, 10.0, 11.0),)


def test_gather_timeline_and_clock_offset():
    def on_rank():
        import torch.distributed as dist

        recorder = SpanRecorder()
        dist.barrier()
        with recorder.record("F", dist.get_rank(), 0):
            pass
        metadata = {"schedule": "gpipe", "ranks": 2, "stages_per_rank": 3, "microbatches": 8}
        return gather_timeline(recorder, None, **metadata), clock_offset()

    results = run_ranks(on_rank, 2)
    timeline = results[0][0]
    assert timeline == results[1][0] and timeline.stages == 6
    assert timeline.microbatches == 1, "as many as were recorded"
    assert [span.stage for row in timeline.spans for span in row] == [0, 1]
    # Both ranks share one clock, so the offset is only the difference in leaving the barrier.
    assert results[0][1] == 0 and abs(results[1][1]) < 0.25


def test_perfetto(tmp_path):
    timeline = simulate(4, 8)
    to_perfetto(timeline, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(map(len, timeline.spans))
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert {(event["tid"], event["cat"]) for event in events} == {
        (0, "F"),
        (0, "B"),
        (1, "receive_forward"),
        (1, "receive_backward"),
    }
    first = next(event for event in events if event["cat"] == "F")
    assert first["ts"] == 0 and first["dur"] == pytest.approx(FORWARD * 1e6, rel=1e-3)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_later_chunks_are_darker():
    """In an interleaved schedule a rank computes several chunks."""
    spans = [[Span("F", stage, 0, stage, stage + 1)] for stage in range(2)]
    spans = [[*row, Span("F", row[0].stage + 2, 0, 4, 5)] for row in spans]
    timeline = Timeline(spans, "interleaved_1f1b", 2, 4, 1)
    axes = Figure().add_subplot()
    draw_bars(axes, timeline, 14.0)
    first, second, third, fourth = (sum(bars.get_facecolor()[0][:3]) for bars in axes.collections)
    assert first == third > second == fourth
    assert [name for name, _ in list_legend(timeline)] == ["forward, chunk 0", "forward, chunk 1"]


def test_write_pictures_writes_all_files(tmp_path):
    paths = write_pictures(simulate(2, 4), tmp_path / "new" / "folder", "timeline-step2", 0.2)
    assert [path.name for path in paths] == ["timeline-step2.png", "timeline-step2.json"]
    assert sorted((tmp_path / "new" / "folder").iterdir()) == sorted(paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG") and paths[0].stat().st_size > 5000


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "picture.json"
    file.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        to_perfetto(simulate(2, 4), file)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.json"] and file.read_text() == "old"


def test_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "hf_megatron\[plots\]"'):
        to_png(simulate(2, 4), tmp_path / "picture.png", 0.2)
    with pytest.raises(ConfigError, match="matplotlib"):
        write_pictures(simulate(2, 4), tmp_path, "timeline", 0.2)
    assert not list(tmp_path.iterdir())


def test_callback_needs_a_pipeline():
    from hf_megatron.integrations.trainer.callbacks.timeline import TimelineCallback

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **sizes))
    with pytest.raises(ConfigError, match="pp_size"):
        TimelineCallback("nowhere").on_train_begin(None, None, None, model=model)


def test_callback_records_its_steps_and_rank_0_writes(tmp_path):
    """Uses a stub pipeline with only the attributes that the callback reads."""

    def on_rank():
        import torch.distributed as dist

        from hf_megatron.integrations.trainer.callbacks.timeline import TimelineCallback

        rank = dist.get_rank()
        if rank == 1:
            sys.modules["matplotlib"] = None  # type: ignore[assignment]
        metadata = {"schedule": "1f1b", "ranks": 2, "stages_per_rank": 1, "microbatches": 8}
        pipeline = SimpleNamespace(recorder=None, describe=lambda: metadata)
        mesh = SimpleNamespace(pp_group=None, device_type="cpu")
        model = SimpleNamespace(_hf_megatron=SimpleNamespace(pipeline=pipeline, mesh=mesh))
        callback, is_recording = TimelineCallback(tmp_path, steps=(1, 2)), []
        callback.on_train_begin(None, None, None, model=model)
        for step in range(4):
            callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
            is_recording.append(pipeline.recorder is not None)
            if pipeline.recorder is not None:
                with pipeline.recorder.record("F", rank, 0):
                    time.sleep(0.001)
            callback.on_pre_optimizer_step(None, None, None)
            callback.on_optimizer_step(None, None, None)
            callback.on_step_end(None, SimpleNamespace(global_step=step + 1), None)
        callback.on_train_end(None, None, None)
        return is_recording, pipeline.recorder

    assert run_ranks(on_rank, 2) == [([False, True, True, False], None)] * 2
    expected = {f"timeline-step{step}.{ending}" for step in (1, 2) for ending in ("png", "json")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    events = json.loads((tmp_path / "timeline-step2.json").read_text())["traceEvents"]
    assert [event["cat"] for event in events if event["ph"] == "X"] == ["F", "optimizer"] * 2


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma3_text", "qwen3_moe"])
def test_small_config_builds(model_type):
    config = small_config(AutoConfig.for_model(model_type), layers=5, sequence_length=100, hidden=32)
    model = AutoModelForCausalLM.from_config(config)
    layers = [name for name, _ in model.named_modules() if re.fullmatch(r".*\.(layers|h)\.\d+", name)]
    assert len(layers) == 5 and model.get_input_embeddings().weight.shape[1] == 32


def test_config_is_checked_first(tmp_path):
    from hf_megatron import MegatronConfig

    with pytest.raises(ConfigError, match="pp_size"):
        draw_timeline("llama", MegatronConfig(), tmp_path)
    with pytest.raises(ConfigError, match="pipeline_schedule"):
        draw_timeline("llama", MegatronConfig(pp_size=2, pipeline_schedule="fast"), tmp_path)
    with pytest.raises(ConfigError, match="virtual_stages"):
        draw_timeline("llama", MegatronConfig(pp_size=2, virtual_stages=2), tmp_path)
    with pytest.raises(ConfigError, match="steps"):
        draw_timeline("llama", MegatronConfig(pp_size=2), tmp_path, steps=0)
