"""`python -m tests.fuzz`: cases by number, verdicts, shrinking, scripts, and what it has found."""

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
from tests.fuzz.cases import draw_case, fits, ranks_of, simple_case, together
from tests.fuzz.judging import ACCEPTED
from tests.fuzz.pattern import LoopPattern
from tests.fuzz.patterns import LOOP_PATTERNS
from tests.fuzz.runner import run_cases
from tests.fuzz.script import reproduction
from tests.fuzz.shrinking import shrink

SEEDS = json.loads((Path(__file__).parents[2] / "data" / "fuzz_seeds.json").read_text(encoding="utf-8"))


def judgments(cases, timeout=60.0):
    return [result["judgment"] for _, result in run_cases(cases, timeout)]


def test_a_case_depends_on_seed_and_number_alone():
    drawn = [draw_case(5, number) for number in range(300)]
    assert drawn == [draw_case(5, number) for number in range(300)]
    assert drawn == json.loads(json.dumps(drawn))
    assert len({json.dumps(case) for case in drawn}) == 300
    assert drawn[:20] != [draw_case(6, number) for number in range(20)]
    for case in drawn:
        assert ranks_of(case["layout"]) in (2, 3, 4)
        assert together(case["habits"], case["layout"]) and all(fits(case, name) for name in case["habits"])


def damage(loop):
    """On ranks a layer norm counts twice."""
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


def test_loops_of_accelerate_leave_its_state():
    """No stock `Accelerator` after one of the case's own: the state of both is the process's."""
    case = simple_case("tp2", "stock afterwards", loop="accelerate")
    assert not fits(case, "stock afterwards") and fits({**case, "loop": "plain"}, "stock afterwards")


def test_a_partial_loss_is_logged_in_full():
    case = simple_case("dp2", "own loss", loop_patterns=["own loss", "loss read"])
    assert judgments([case]) == ["equal"]


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_faults_are_found(name, monkeypatch):
    judgment, made = SEEDED[name]
    monkeypatch.setitem(LOOP_PATTERNS, "plain", LoopPattern("plain", "", made=made))
    assert judgments([simple_case("tp2", "plain"), simple_case("tp2", "total norm")]) == [judgment, "equal"]


def test_a_hang_is_cut(monkeypatch):
    monkeypatch.setitem(LOOP_PATTERNS, "plain", LoopPattern("plain", "", made=sleep))
    assert judgments([simple_case("tp2", "plain")], timeout=4.0) == ["hang"]


def test_a_seeded_fault_shrinks_to_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(LOOP_PATTERNS, "total norm", LoopPattern("total norm", "", made=damage))
    batch = simple_case("tp2", "plain")["batch"] | {"rows": 5, "padding": "left", "accumulation": 2}
    case = simple_case("tp2+sp", "total norm", "qwen3", batch=batch, loop_patterns=["total norm", "loss scaled"])
    found = shrink(case, "differs")
    assert found["habits"] == ["total norm"] and found["type"] == "llama" and found["layout"] == {"tp_size": 2}
    assert found["batch"]["steps"] == 1 and found["batch"]["padding"] == "none" and found["batch"]["accumulation"] == 1
    text = reproduction(found, {"judgment": "differs", "worst": "a norm"})
    compile(text, "case.py", "exec")
    assert "def damage(loop)" in text and "hf_megatron.testing" not in text


def test_a_script_runs_alone(tmp_path):
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


def test_a_campaign_goes_on_where_it_was(tmp_path):
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
def test_what_was_found_is_mended(name):
    """Cases that differed once, shrunk."""
    for case, result in run_cases([SEEDS[name]["case"]], 60.0):
        assert result["judgment"] in ACCEPTED, (case, result)
