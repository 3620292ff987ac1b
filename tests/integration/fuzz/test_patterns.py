"""The table of loop habits in docs/surface.md, walked through: each cell is run again and compared with one process."""

import pytest

from tests.fuzz.patterns import LOOP_PATTERNS
from tests.helpers.loop_patterns import ALLOWED, LAYOUTS, recorded, run


def slow(name):
    return LOOP_PATTERNS[name].slow


def test_every_cell_is_recorded():
    rows = recorded()
    assert rows.keys() == LOOP_PATTERNS.keys()
    assert all(tuple(row) == LAYOUTS for row in rows.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_other_cell_is_equal_or_refused(layout):
    found = {name: row[layout][0] for name, row in recorded().items()}
    assert not {name for name, judgment in found.items() if judgment not in ALLOWED}


def walk(layout, names):
    found = {name: result["judgment"] for name, result in run(layout, names).items()}
    return {name: judgment for name, judgment in found.items() if judgment != recorded()[name][layout][0]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_patterns_give_what_is_recorded(layout):
    assert walk(layout, [name for name in LOOP_PATTERNS if not slow(name)]) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_patterns_give_what_is_recorded(layout):
    assert walk(layout, [name for name in LOOP_PATTERNS if slow(name)]) == {}
