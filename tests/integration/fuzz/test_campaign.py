"""Tests of `python -m tests.fuzz`: cases, judgments, shrinking, reproduction scripts and recorded failures."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.fuzz.__main__ import fuzz
from tests.fuzz.campaign import read_log, run_campaign
from tests.fuzz.cases import count_ranks, draw_case, fits, simple_case, together
from tests.fuzz.judging import ACCEPTED
from tests.fuzz.pattern import LoopPattern
from tests.fuzz.patterns import LOOP_PATTERNS
from tests.fuzz.runner import run_cases
from tests.fuzz.script import reproduction
from tests.fuzz.shrinking import shrink

SEEDS = json.loads((Path(__file__).parents[2] / "data" / "fuzz_seeds.json").read_text(encoding="utf-8"))


def run_and_judge(cases, timeout=60.0):
    return [result["judgment"] for _, result in run_cases(cases, timeout)]


def test_case_depends_only_on_seed_and_number():
    drawn = [draw_case(5, number) for number in range(300)]
    assert drawn == [draw_case(5, number) for number in range(300)]
    assert drawn == json.loads(json.dumps(drawn))
    assert len({json.dumps(case) for case in drawn}) == 300
    assert drawn[:20] != [draw_case(6, number) for number in range(20)]
    for case in drawn:
        assert count_ranks(case["layout"]) in (2, 3, 4)
        assert together(case["loop_patterns"], case["layout"])
        assert all(fits(case, name) for name in case["loop_patterns"])


def damage(loop):
    """Doubles the weight of a norm on ranks only."""
    if loop.on_ranks:
        with torch.no_grad():
            next(p for name, p in loop.model.named_parameters() if "norm" in name).mul_(2)


def drift(loop):
    if loop.rank == 1:
        with torch.no_grad():
            next(p for name, p in loop.model.named_parameters() if "norm" in name).mul_(1.0001)


def sleep(loop):
    if loop.rank == 1:
        time.sleep(600)


def fail(loop):
    raise KeyError("nothing")


def fail_on_ranks(loop):
    if loop.on_ranks:
        raise RuntimeError("nothing")


SEEDED = {
    "damage": ("differs", damage),
    "drift": ("ranks disagree", drift),
    "fail": ("raises alike", fail),
    "fail_on_ranks": ("crash", fail_on_ranks),
}


def test_stock_pattern_does_not_fit_accelerate_loops():
    """A loop with its own `Accelerator` cannot check a later stock one: both share the per-process state."""
    case = simple_case("tp2", "stock afterwards", loop="accelerate")
    assert not fits(case, "stock afterwards") and fits({**case, "loop": "plain"}, "stock afterwards")


def test_local_loss_is_logged_globally():
    case = simple_case("dp2", "own loss", loop_patterns=["own loss", "loss read"])
    assert run_and_judge([case]) == ["equal"]


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_faults_are_detected(name, monkeypatch):
    judgment, made = SEEDED[name]
    monkeypatch.setitem(LOOP_PATTERNS, "plain", LoopPattern("plain", "", made=made))
    assert run_and_judge([simple_case("tp2", "plain"), simple_case("tp2", "total norm")]) == [judgment, "equal"]


def test_hang_times_out(monkeypatch):
    monkeypatch.setitem(LOOP_PATTERNS, "plain", LoopPattern("plain", "", made=sleep))
    assert run_and_judge([simple_case("tp2", "plain")], timeout=4.0) == ["hang"]


def test_seeded_fault_shrinks_to_minimal_case(monkeypatch, tmp_path):
    monkeypatch.setitem(LOOP_PATTERNS, "total norm", LoopPattern("total norm", "", made=damage))
    batch = simple_case("tp2", "plain")["batch"] | {"rows": 5, "padding": "left", "accumulation": 2}
    case = simple_case("tp2+sp", "total norm", "qwen3", batch=batch, loop_patterns=["total norm", "loss scaled"])
    shrunk = shrink(case, "differs")
    assert shrunk["loop_patterns"] == ["total norm"]
    assert shrunk["type"] == "llama" and shrunk["layout"] == {"tp_size": 2}
    assert (
        shrunk["batch"]["steps"] == 1 and shrunk["batch"]["padding"] == "none" and shrunk["batch"]["accumulation"] == 1
    )
    text = reproduction(shrunk, {"judgment": "differs", "worst": "a norm"})
    compile(text, "case.py", "exec")
    assert "def damage(loop)" in text and "hf_megatron.testing" not in text


def test_script_runs_standalone(tmp_path):
    case = simple_case("tp2", "soft prompt")
    (tmp_path / "case.py").write_text(reproduction(case, {"judgment": "equal", "worst": ""}, 2.0), encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    outputs = []
    for start in ([sys.executable], launcher):
        result = subprocess.run([*start, "case.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0 and "error" not in result.stdout, result.stderr + result.stdout
        outputs.append(result.stdout)
    assert "one process:" in outputs[0] and "rank 1:" in outputs[1]
    worst = float(outputs[1].split("largest differences of weights:")[1].split(", ")[1].partition(")")[0])
    assert worst < 1e-5


def test_campaign_resumes_from_log(tmp_path):
    log = tmp_path / "log.jsonl"
    options = {"only": ("llama", "plain"), "layouts": ("tp2",), "log": log, "echo": lambda line: None}
    first = run_campaign(cases=2, **options)
    with log.open("a", encoding="utf-8") as file:
        file.write('{"seed": 0, "number": 2, "verd')
    log.write_text(log.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    second = run_campaign(cases=3, **options)
    assert [row["number"] for row in first] == [0, 1] and [row["number"] for row in second] == [2]
    assert [row["number"] for row in read_log(log)] == [0, 1, 2]
    assert {row["judgment"] for row in read_log(log)} == {"equal"}
    assert all(row["case"] == draw_case(0, row["number"], ("llama", "plain"), ("tp2",)) for row in read_log(log))


def test_exit_codes(tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(fuzz)
    options = ["--only", "llama,plain", "--layouts", "tp2", "--cases", "1", "--resume", str(tmp_path / "log")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0 and "1 cases: 1 equal" in result.output, result.output
    result = CliRunner().invoke(app, ["--only", "lama"])
    assert result.exit_code == 2 and "lama" in result.output
    monkeypatch.setitem(LOOP_PATTERNS, "plain", LoopPattern("plain", "", made=damage))
    result = CliRunner().invoke(app, [*options[:-2], "--scripts", str(tmp_path)])
    assert result.exit_code == 1 and "differs" in result.output
    assert list(tmp_path.glob("case_0_0.py"))


@pytest.mark.parametrize("name", SEEDS)
def test_recorded_failures_are_fixed(name):
    """Shrunk cases that once failed must be accepted."""
    for case, result in run_cases([SEEDS[name]["case"]], 60.0):
        assert result["judgment"] in ACCEPTED, (case, result)
