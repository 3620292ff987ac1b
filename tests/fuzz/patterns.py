"""All habits, by name."""

from collections.abc import Iterable, Mapping

from tests.fuzz.gradient_patterns import GRADIENT_HABITS
from tests.fuzz.loss_patterns import LOSS_HABITS
from tests.fuzz.pattern import Habit
from tests.fuzz.weight_patterns import WEIGHT_HABITS

HABITS: Mapping[str, Habit] = {habit.name: habit for habit in (*GRADIENT_HABITS, *LOSS_HABITS, *WEIGHT_HABITS)}


def habits_of(names: Iterable[str]) -> list[Habit]:
    """Returns the habits of a case, in its order."""
    return [HABITS[name] for name in names]
