"""Tests of the loop pattern table in docs/surface.md: reruns each cell and compares it with the single-process run."""

import pytest

from tests.fuzz.patterns import LOOP_PATTERNS
from tests.helpers.loop_patterns import ALLOWED, LAYOUTS, load_results, run_patterns


def is_slow(name):
    return LOOP_PATTERNS[name].slow


def test_every_cell_is_recorded():
    rows = load_results()
    assert rows.keys() == LOOP_PATTERNS.keys()
    assert all(tuple(row) == LAYOUTS for row in rows.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_cells_are_allowed(layout):
    judgments = {name: row[layout][0] for name, row in load_results().items()}
    assert not {name for name, judgment in judgments.items() if judgment not in ALLOWED}


def find_changed_cells(layout, names):
    judgments = {name: result["judgment"] for name, result in run_patterns(layout, names).items()}
    return {name: judgment for name, judgment in judgments.items() if judgment != load_results()[name][layout][0]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fast_patterns_match_records(layout):
    assert find_changed_cells(layout, [name for name in LOOP_PATTERNS if not is_slow(name)]) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_patterns_match_records(layout):
    assert find_changed_cells(layout, [name for name in LOOP_PATTERNS if is_slow(name)]) == {}
