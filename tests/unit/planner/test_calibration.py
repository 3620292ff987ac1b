"""Tests of the calibrated time model on published runs: recorded errors and measured rankings."""

import importlib
import json
import statistics
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RECORDED = json.loads((BENCHMARKS / "results" / "planner_calibration.json").read_text(encoding="utf-8"))


@pytest.fixture
def calibration(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("calibrate_planner")


def test_library_constants_match_the_fit(calibration):
    assert calibration.committed() == pytest.approx(RECORDED["constants"])


def test_errors_match_the_record(calibration):
    _, models, rows = calibration.read_rows()
    errors = calibration.exact_errors(rows, models, calibration.committed())
    assert [row.name for row in rows] == [entry["name"] for entry in RECORDED["rows"]]
    assert errors == pytest.approx([entry["error"] for entry in RECORDED["rows"]], abs=2e-4)
    sizes = [abs(error) for row, error in zip(rows, errors, strict=True) if not row.held_out]
    assert statistics.median(sizes) < 0.04 and sum(size <= 0.15 for size in sizes) >= 20
    orders = calibration.right_orders(rows, errors)
    assert orders["A"] and orders["E"] and orders == RECORDED["orders_right"]


def test_docs_page_contains_the_table(calibration):
    page = (BENCHMARKS.parent / "docs" / "planner.md").read_text(encoding="utf-8")
    assert calibration.table(RECORDED["rows"]) in page


def test_linearized_step_matches_the_simulator(calibration):
    """The linearization used by the fit equals the simulator at its expansion point."""
    _, models, rows = calibration.read_rows()
    constants = calibration.committed()
    for row in (row for row in rows if row.layout.pp > 1 and row.layout.vp < 4):
        line = calibration.line_of(row, models[row.model], constants)
        error = calibration.exact_errors([row], models, constants)[0]
        assert line.error(constants) == pytest.approx(calibration.math.log(1 + error), abs=1e-6)
