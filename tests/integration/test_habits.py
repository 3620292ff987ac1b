"""The table of loop habits in docs/surface.md, walked through: each cell is run again and compared with one process."""

import pytest

from tests.fuzz.patterns import HABITS
from tests.habits import ALLOWED, LAYOUTS, recorded, run


def slow(name):
    return HABITS[name].slow


def test_every_cell_is_recorded():
    rows = recorded()
    assert rows.keys() == HABITS.keys()
    assert all(tuple(row) == LAYOUTS for row in rows.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_other_cell_is_equal_or_refused(layout):
    found = {name: row[layout][0] for name, row in recorded().items()}
    assert not {name for name, verdict in found.items() if verdict not in ALLOWED}


def walk(layout, names):
    found = {name: result["verdict"] for name, result in run(layout, names).items()}
    return {name: verdict for name, verdict in found.items() if verdict != recorded()[name][layout][0]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_habits_give_what_is_recorded(layout):
    assert walk(layout, [name for name in HABITS if not slow(name)]) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_habits_give_what_is_recorded(layout):
    assert walk(layout, [name for name in HABITS if slow(name)]) == {}
