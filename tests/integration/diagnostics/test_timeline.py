"""Tests of recorded pipeline steps: each computation appears once, on its rank and after its dependencies."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.spans import COMPUTE, bubble_share
from hf_megatron.integrations.trainer.callbacks.timeline import TimelineCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel.schedules import rank_actions
from hf_megatron.testing.pipeline_timeline import draw_timeline

RANKS, MICROBATCHES = 2, 4


@pytest.fixture(scope="module", params=["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def timeline(request, tmp_path_factory):
    config = MegatronConfig(pp_size=RANKS, num_microbatches=MICROBATCHES, pipeline_schedule=request.param)
    folder = tmp_path_factory.mktemp("timeline")
    lines: list[str] = []
    result = draw_timeline("llama", config, folder, layers=4, batch_size=4, sequence_length=16, echo=lines.append)
    assert {path.name for path in folder.iterdir()} == {f"timeline-step2.{end}" for end in ("png", "json")}
    assert lines[-1].startswith("bubble: measured ") and "formula" in lines[-1]
    return result


def list_computations(timeline, rank):
    return [span for span in timeline.spans[rank] if span.kind in COMPUTE]


def test_computations_match_schedule(timeline):
    actions = rank_actions(timeline.schedule, RANKS, timeline.stages // RANKS, MICROBATCHES)
    for rank in range(RANKS):
        planned = [(action.kind.value, action.stage, action.microbatch) for action in actions[rank]]
        # The first stage sends no input gradient: its full backward is the second of the two actions.
        planned = [entry for entry in planned if entry[0] in COMPUTE and entry[:2] != ("I", 0)]
        assert [(span.kind, span.stage, span.microbatch) for span in list_computations(timeline, rank)] == planned


def test_rank_computations_do_not_overlap(timeline):
    for rank in range(RANKS):
        spans = list_computations(timeline, rank)
        assert all(first.stop <= second.start for first, second in zip(spans[:-1], spans[1:], strict=True))


def test_computations_start_after_dependencies(timeline):
    forwards, backwards = {}, {}
    for rank in range(RANKS):
        for span in list_computations(timeline, rank):
            if span.kind == "F":
                forwards[span.stage, span.microbatch] = span
            elif span.kind in ("B", "I") or span.stage == 0:
                backwards[span.stage, span.microbatch] = span
    assert len(forwards) == len(backwards) == timeline.stages * MICROBATCHES
    for (stage, microbatch), span in forwards.items():
        if stage > 0:
            assert forwards[stage - 1, microbatch].stop <= span.start
        assert span.stop <= backwards[stage, microbatch].start
    for (stage, microbatch), span in backwards.items():
        if stage < timeline.stages - 1:
            assert backwards[stage + 1, microbatch].stop <= span.start


def test_communication_and_optimizer_spans(timeline):
    kinds = [{span.kind for span in spans} for spans in timeline.spans]
    assert "receive_backward" in kinds[0] and "receive_forward" in kinds[1]
    assert all("optimizer" in rank_kinds for rank_kinds in kinds)
    assert 0 < bubble_share(timeline) < 1


def test_command(tmp_path):
    command = ["timeline", "gpt2", "--output", str(tmp_path)]
    options = ["--layout", "pp2+mb2", "--global-batch-size", "2", "--layers", "2", "--seq-length", "8", "--steps", "1"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "bubble: measured" in result.stdout and (tmp_path / "timeline-step0.png").stat().st_size > 5000
    wrong = CliRunner().invoke(app, [*command, "--schedule", "fast"])
    assert wrong.exit_code == 2 and "pipeline_schedule" in wrong.stderr


def test_trainer(stories, tmp_path):
    def train():
        layout = ConfigUnderTest(pp_size=RANKS, num_microbatches=MICROBATCHES)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(stories), megatron_config=layout)
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=4,
            max_steps=3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        ids = torch.randint(3, 512, (16, 17), generator=torch.Generator().manual_seed(0))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        callback = TimelineCallback(tmp_path / "pictures", steps=(1,))
        Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[callback]).train()

    run_ranks(train, RANKS)
    events = json.loads((tmp_path / "pictures" / "timeline-step1.json").read_text())["traceEvents"]
    counts = {kind: sum(event.get("cat") == kind for event in events) for kind in ("F", "B", "optimizer")}
    assert counts == {"F": RANKS * MICROBATCHES, "B": RANKS * MICROBATCHES, "optimizer": RANKS}
