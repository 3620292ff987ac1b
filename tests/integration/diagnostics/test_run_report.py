"""Tests of run reports: recorded metrics, text and charts, and rendering in a browser in light and dark mode."""

import importlib.util
import json
import math
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.diagnostics.run_charts import line_chart
from hf_megatron.diagnostics.run_record import add_logs, add_skipped, read_run
from hf_megatron.diagnostics.run_report import write_page
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.run import RunCallback
from hf_megatron.integrations.trainer.callbacks.traces import TraceCallback

ROOT = Path(__file__).parents[3]
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def made_run():
    spec = importlib.util.spec_from_file_location("made_run", ROOT / "benchmarks" / "made_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_run


class _ReportParser(HTMLParser):
    """Collects the text and counts the elements of a report; rejects external resources and unbalanced tags."""

    VOID = ("meta", "br", "line", "rect", "circle", "polyline", "polygon")

    def __init__(self, text):
        super().__init__()
        self.open, self.counts, self.text = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not (name in ("src", "href") and value), "needs nothing else"

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.text.append(data)


def _render_report(run, path, planned=None):
    write_page(run, path, planned)
    text = path.read_text("utf-8")
    page = _ReportParser(text)
    return page, " ".join(" ".join(page.text).split())


def _train_on_rank(folder, resume=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
    rows = [{"input_ids": [place % 64] * 32, "labels": [place % 64] * 32} for place in range(64)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 6 if resume else 4, "report_to": "none"}
    settings |= {"save_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, **settings)
    # Another callback traces the same step.
    callbacks = [RunCallback(folder / "run", peak_tflops=0.1), TraceCallback(folder / f"traces{resume is None}", [2])]
    Trainer(model, arguments, default_data_collator, rows, callbacks=callbacks).train(resume_from_checkpoint=resume)


def test_run_is_recorded_and_resumed(tmp_path):
    run_ranks(lambda: _train_on_rank(tmp_path), 2)
    run = read_run(tmp_path / "run")
    assert [step for step, _ in run.series("loss")] == [1, 2, 3, 4]
    assert all(value > 0 for _, value in run.series("mfu"))
    assert (run.facts.ranks, run.facts.axes, len(run.memory), len(run.traces)) == (
        2,
        {"dp": 1, "pp": 1, "cp": 1, "tp": 2},
        2,
        2,
    )
    assert run.facts.parameters == sum(
        parameter.numel() for parameter in AutoModelForCausalLM.from_config(LLAMA).parameters()
    )
    run_ranks(lambda: _train_on_rank(tmp_path, str(tmp_path / "out" / "checkpoint-2")), 2)
    assert [step for step, _ in read_run(tmp_path / "run").series("loss")] == [1, 2, 3, 4, 5, 6]
    result = CliRunner().invoke(app, ["debug", "report", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "run" / "page.html").read_text("utf-8")
    assert "LlamaForCausalLM on 2 ranks: tp2" in text
    for heading in ("Where the time of a step goes", "One step", "Memory at its fullest", "Who stands where"):
        assert heading in text
    assert "the line is what was planned" in text


def test_anomalies_are_reported(tmp_path, made_run):
    made_run(tmp_path, ranks=16, steps=400, broken=233, slow=9)
    run = read_run(tmp_path)
    planned = {one.pipeline_rank: int(one.peak / (1.3 if one.pipeline_rank == 2 else 1.0)) for one in run.memory}
    page, text = _render_report(run, tmp_path / "page.html", planned)
    assert "The loss was not finite at step 233." in text
    assert "rank 9 (stage 2) is slow: 1.61 x the usual time" in text
    assert "holds 30% more than planned at its fullest" in text
    assert page.counts["svg"] == 6 + 4
    assert page.counts["polyline"] == 6
    # The report has one box per rank.
    assert text.count(" 9 ") >= 1 and "node00 (8 ranks), node01 (8 ranks)" in text
    for step in range(401, 601):
        add_logs(tmp_path, {"step": step, "loss": 6.0, "tokens_per_second": 1.5e6})
    _, text = _render_report(read_run(tmp_path), tmp_path / "page.html")
    assert "The loss has risen: 6 of late" in text
    assert "Slower than before: 1,500,000 tokens per second of late" in text


def test_clean_run_report(tmp_path, made_run):
    made_run(tmp_path, ranks=16, steps=100)
    _, text = _render_report(read_run(tmp_path), tmp_path / "page.html")
    assert "Nothing stands out in what was recorded: 100 logged losses, a step's trace, a step's memory" in text


def test_names_are_escaped(tmp_path, made_run):
    made_run(tmp_path, ranks=16, steps=20)
    metadata = json.loads((tmp_path / "run.json").read_text("utf-8"))
    (tmp_path / "run.json").write_text(json.dumps(metadata | {"model": "<script>alert(1)</script>"}), "utf-8")
    logs = {"step": 20, "loss": 1.0, "expert_load/<img src=x>": 2.0}
    add_logs(tmp_path, logs)
    write_page(read_run(tmp_path), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<script" not in text and "<img" not in text


def test_long_run_report_size(tmp_path, made_run):
    made_run(tmp_path, ranks=64, steps=10_000)
    write_page(read_run(tmp_path), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2e6


def test_charts_with_degenerate_series():
    assert line_chart("loss", [(1, math.nan), (2, math.inf)]) == ""
    assert "<circle" in line_chart("loss", [(1, 2.0)])
    assert "polyline" in line_chart("loss", [(step, 0.0) for step in range(10)])
    chart = line_chart("loss", [(step, 1e6 if step == 77 else 1.0) for step in range(1000)])
    # A single outlier does not flatten the other values.
    assert "1M" not in chart


def test_incomplete_or_resumed_run_report(tmp_path, made_run):
    made_run(tmp_path, ranks=16, steps=40)
    (tmp_path / "trace" / "rank00003.json").unlink()
    (tmp_path / "memory" / "rank00015.json").unlink()
    _, text = _render_report(read_run(tmp_path), tmp_path / "page.html")
    assert "No trace:" in text and "the traces of ranks 3 are missing" in text
    assert "The memory covers 15 of 16 ranks." in text
    metadata = json.loads((tmp_path / "run.json").read_text("utf-8"))
    (tmp_path / "run.json").write_text(json.dumps(metadata | {"layout": "tp2"}), "utf-8")
    _, text = _render_report(read_run(tmp_path), tmp_path / "page.html")
    assert "The memory is from 16 ranks with tp4+pp4, before the run continued with tp2." in text
    truncated = (tmp_path / "memory" / "rank00002.json").read_text("utf-8")[:300]
    (tmp_path / "memory" / "rank00002.json").write_text(truncated, "utf-8")
    _, text = _render_report(read_run(tmp_path), tmp_path / "page.html")
    assert "rank00002.json: is damaged" in text
    for command, folder in (("memory", "trace"), ("trace", "memory"), ("hang", "memory"), ("compare", "trace")):
        arguments = [str(tmp_path / folder)] * (2 if command == "compare" else 1)
        result = CliRunner().invoke(app, ["debug", command, *arguments])
        assert result.exit_code == 2 and "rank0000" in result.output.replace("\n", ""), result.output


def test_evaluations_and_skipped_steps(tmp_path, made_run):
    made_run(tmp_path, ranks=16, steps=40)
    for values in ({"eval_loss": 3.5}, {"eval_other_loss": 4.5}, {"train_runtime": 1.0, "train_loss": 2.0}):
        add_logs(tmp_path, {"step": 40, **values})
    add_skipped(tmp_path, 7)
    add_skipped(tmp_path, 9)
    run = read_run(tmp_path)
    assert run.series("eval_loss") == [(40, 3.5)] and run.series("train_loss") == [(40, 2.0)]
    _, text = _render_report(run, tmp_path / "page.html")
    assert "Step 7 was skipped and 1 more times: gradients were not finite." in text


@shard_safe
def _return_nan(module, args, output):
    return output * torch.nan


class _NonFiniteStep(TrainerCallback):
    """Makes the gradients of one step non-finite; Trainer leaves its loss out of the logs."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            self.hook = model.model.norm.register_forward_hook(_return_nan)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.hook.remove()


def _train_in_used_folder(folder):
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(dp_size=2, zero_stage=0))
    rows = [{"input_ids": [place % 64] * 32, "labels": [place % 64] * 32} for place in range(64)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 5, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, logging_steps=5, **settings)
    run = RunCallback(folder / "run", memory_step=None, trace_step=None)
    trainer = Trainer(model, arguments, default_data_collator, rows, callbacks=[run, _NonFiniteStep()])
    trainer.train()
    with pytest.raises(ConfigError, match="already has a run, and this one starts at step 0"):
        trainer.train()


def test_folder_holds_one_run(tmp_path):
    run_ranks(lambda: _train_in_used_folder(tmp_path), 2)
    run = read_run(tmp_path / "run")
    assert run.skipped == [4]
    assert len(run.series("loss")) == 1


def test_invalid_runs_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"has no file run.json"):
        read_run(tmp_path)
    for wrong in ({"memory_step": -1}, {"trace_step": "2"}, {"peak_tflops": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RunCallback(tmp_path, **wrong)
    with pytest.raises(ConfigError, match="expected two different steps"):
        RunCallback(tmp_path, memory_step=2, trace_step=2)
    result = CliRunner().invoke(app, ["debug", "report", str(tmp_path)])
    assert result.exit_code == 2
    assert not (tmp_path / "page.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_in_a_browser(tmp_path, made_run):
    from PIL import Image

    made_run(tmp_path, ranks=64, steps=1000, slow=37)
    write_page(read_run(tmp_path), tmp_path / "page.html")
    page = (tmp_path / "page.html").as_uri()
    options = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    colors = {}
    for name, settings in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        for width in (1100, 420):
            screenshot = tmp_path / f"{name}{width}.png"
            command = [*options, *settings, f"--window-size={width},1600", f"--screenshot={screenshot}", page]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            pixels = Image.open(screenshot).convert("RGB")
            colors[name, width] = pixels.getpixel((2, 2))
            # Charts add their own colors.
            assert len(pixels.getcolors(1 << 24)) > 200
    assert min(colors["light", 1100]) > 200 and max(colors["dark", 1100]) < 60
    # The DOM has all written charts: the parser dropped none.
    dom = subprocess.run([*options, "--dump-dom", page], check=True, capture_output=True, timeout=120, text=True).stdout
    assert dom.count("<svg") == (tmp_path / "page.html").read_text("utf-8").count("<svg")
    assert dom.rstrip().endswith("</html>")
