"""The benchmarks run, and every variant starts with one process's loss; megatron-core in processes of its own."""

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_benchmark(out, script, *arguments):
    command = [sys.executable, f"benchmarks/{script}", "--models", "tiny", "--rounds", "1", "--out", str(out)]
    result = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    [run] = json.loads(out.read_text())["runs"]
    return run


def test_train_step_with_megatron_core(tmp_path):
    variants = ["transformers_tp", "megatron_core", "plain_megatron", "hf_megatron", "hf_megatron_chunked"]
    run = run_benchmark(tmp_path / "result.json", "train_step.py", "--dtypes", "fp32", "--variants", *variants)
    assert run["skipped"] == {}
    assert run["variants"].keys() == {"one_process_2_threads", *variants}
    losses = [entry["first_loss"] for entry in run["variants"].values()]
    assert max(losses) - min(losses) < 1e-5 * losses[0]


def test_pipeline_against_torch(tmp_path):
    schedules = ["zbv"]
    options = ["--microbatches", "4", "--schedules", *schedules]
    run = run_benchmark(tmp_path / "result.json", "pipeline.py", *options)
    assert run["schedules"].keys() == set(schedules)
    for entry in run["schedules"].values():
        assert entry["variants"].keys() == {"one_process_2_threads", "torch", "hf_megatron"}
        assert len(entry["peak_rss_over_torch"]) == 2
        assert 0 < entry["bubble"] < 0.3
        losses = [variant["first_loss"] for variant in entry["variants"].values()]
        assert max(losses) - min(losses) < 1e-5 * losses[0]


def run_and_read_report(out, script, *arguments):
    command = [sys.executable, f"benchmarks/{script}", "--rounds", "1", "--out", str(out), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


def test_context_parallel_benchmark(tmp_path):
    sizes = ["--lengths", "512", "--packed-length", "512", "--memory-length", "512"]
    report = run_and_read_report(tmp_path / "result.json", "context_parallel.py", *sizes)
    losses = [row["loss"] for name, row in report["rows"].items() if "apart" not in name]
    assert len(losses) == 6 and max(losses) - min(losses) < 1e-4
    assert all(row["mib_sent_per_rank"][0] > 0 for name, row in report["rows"].items() if "p2p" in name)


def test_expert_parallel_benchmark(tmp_path):
    sizes = ["--tokens", "1024", "--experts", "8", "--choices", "2", "--dtypes", "float32"]
    report = run_and_read_report(tmp_path / "result.json", "expert_parallel.py", *sizes)
    for rows in report["results"].values():
        losses = [row["loss"] for name, row in rows.items() if name.startswith(("tp2", "ep2", "one", "dp2"))]
        assert len(losses) == 6 and max(losses) - min(losses) < 1e-4
        assert 0 < rows["ep2 over dp2"]["share_without_waiting"] <= rows["ep2 over dp2"]["share_in_exchanges"]


def test_post_training_benchmark(tmp_path):
    sizes = ["--steps", "1", "--layers", "2", "--tokens", "512"]
    report = run_and_read_report(tmp_path / "result.json", "post_training.py", *sizes)
    for name in ("DPO", "GRPO"):
        assert report["steps"][name].keys() == {"one process", "TRL with DDP", "tp2", "pp2", "dp2", "tp2, full logits"}
        assert all(entry["seconds"] > 0 for entry in report["steps"][name].values())
    for kind in ("numbers", "divergence"):
        assert report["loss"][kind]["hf_megatron"]["memory_beside_full_logits"] < 1


def test_planner_constants(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/calibrate_planner.py", "--only-check", "--out", str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "21 of 21 within 15%" in result.stdout and "! fails (held out)" in result.stdout
    assert len(json.loads(out.read_text())["rows"]) == 22


@pytest.mark.parametrize(("model", "devices"), [("meta-llama/Llama-3.1-8B", 8), ("mistralai/Mixtral-8x7B-v0.1", 64)])
def test_layouts_page_is_up_to_date(model, devices, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    which_layout = importlib.import_module("which_layout")
    row = which_layout.format_row(which_layout.answer(which_layout.known_models()[model], devices))
    page = which_layout.PAGE.read_text(encoding="utf-8")
    assert row in page.partition(f"## {model}\n")[2].partition("\n## ")[0]
    assert all(f"## {name}\n" in page for name in which_layout.known_models())


def test_data_benchmark(tmp_path):
    words = "--documents", "10000", "--blended", "1000", "--rounds", "1", "--out", str(tmp_path / "data.json")
    command = [sys.executable, "benchmarks/data.py", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads((tmp_path / "data.json").read_text())["results"]
    assert results["open_100_gb"]["bytes"] < 2**20
    assert set(results["order"]) == {"documents", "numpy", "megatron", "ratio"}


def test_muon_memory_benchmark(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/muon_memory.py", "--layouts", "tp2", "--out", str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    full, *_ = rows["DDP, 2 ranks"]["muon_bytes_per_rank"]
    assert sum(rows["tp2"]["muon_bytes_per_rank"]) == full


# Rows that are expected to fail on a CPU, and what their errors say.
NO_LIGER = {} if find_spec("liger_kernel") else {"stock liger": "is not installed", "tp2+sp liger": "is not installed"}
NOT_ON_CPU = NO_LIGER | {
    "tp2+sp": "ConfigError",
    "tp2+sp unpacked": "killed after 0 s",
    "tp2+sp float8 rowwise": "Float8Linear instead of ColumnParallelLinear",
}
# The row "tp2+sp" has a layout that is invalid, and "tp2+sp unpacked" no time.
REHEARSAL = """
import sys
from importlib.util import find_spec
from dataclasses import replace
sys.path.insert(0, "benchmarks")
import gpu
changes = {"tp2+sp": {"layout": {"tp_size": 3}}, "tp2+sp unpacked": {"seconds": 0}}
gpu.ROWS = [replace(row, **changes.get(row.id, {})) for row in gpu.ROWS]
gpu.main(["--device", "cpu", "--tiny", *sys.argv[1:]])
"""


def rehearse(out, *words):
    command = [sys.executable, "-c", REHEARSAL, "--out", str(out), *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


def test_gpu_benchmark_runs_every_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu, chart = importlib.import_module("gpu"), importlib.import_module("gpu_chart")
    report = rehearse(tmp_path / "result.json")
    assert report["schema"] == 1 and report["gpu"]["bf16_tflops"] > 0
    rows = {row["id"]: row for row in report["rows"]}
    assert list(rows) == [row.id for row in gpu.ROWS]
    for name, row in rows.items():
        if name in NOT_ON_CPU:
            assert NOT_ON_CPU[name] in row["error"]
            continue
        assert row["error"] is None, (name, row)
        if row["kind"] == "step":
            assert row["step_ms"]["n"] == 2 and row["step_ms"]["p10"] <= row["step_ms"]["p90"]
            assert row["host_ms"].keys() == {"forward", "backward", "step"} and not row["skipped_steps"]
            assert row["kernel_ms"] is row["launches"] is None and row["mfu_measured_peak"] > 0
            assert row["loss"][0] < 6 and row["loss"][-1] == pytest.approx(row["loss"][0], rel=0.02)
    stock = {row["loss"][0] for name, row in rows.items() if name in ("stock adamw", "stock", "stock compiled")}
    assert len(stock) == 1
    graphs = {name: (row["graphs"], row["graph_breaks"]) for name, row in rows.items() if row.get("graphs")}
    assert graphs["stock compiled"] == graphs["tp2 compiled"] == graphs["1B tp2 compiled"] == (1, 0)
    # Of two layers, the first splits the sequence and the last one gathers it.
    assert graphs["tp2+sp compiled"][0] <= 4 and graphs["tp2+sp compiled"][1] == 0
    # Activations [32, 64] in bf16: two per layer and pass, one each of embedding and head.
    small = rows["tp2"]["bytes_sent"]["tp"] - 10 * 32 * 64 * 2
    assert 0 < small < 1024
    # 7/8 of 115,008 fp32 gradients and bf16 weights.
    assert rows["dp8 zero1"]["bytes_sent"]["dp"] == pytest.approx(115008 * 6 * 7 / 8, rel=0.01)
    assert rows["two ranks, tp2+sp"]["difference"] < 2e-2
    assert rows["8B LoRA tp2"]["flop_rule"] == "4N" and rows["tp2"]["flop_rule"] == "6N+attention"
    chart.draw_chart(report, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {bar[0]} -->" in drawn for bar in chart.collect_bars(report))


def test_gpu_benchmark_drops_rows_and_adds_parts(tmp_path):
    out = tmp_path / "result.json"
    first = rehearse(out, "--part", "1", "--rows", "ceilings", "tp2")
    assert [row["error"] for row in first["rows"]] == [None, None]
    both = rehearse(out, "--part", "2", "--rows", "1B stock")
    assert [row["id"] for row in both["rows"]] == ["ceilings", "tp2", "1B stock"]
    assert both["rows"][2]["mfu_measured_peak"] > 0
    dropped = rehearse(tmp_path / "none.json", "--minutes", "0")
    assert all("dropped" in row["error"] for row in dropped["rows"] if row["id"] != "tp2+sp unpacked")
