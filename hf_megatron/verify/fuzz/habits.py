"""All habits, by name."""

from collections.abc import Iterable, Mapping

from .gradient_habits import GRADIENT_HABITS
from .habit import Habit
from .loss_habits import LOSS_HABITS
from .weight_habits import WEIGHT_HABITS

HABITS: Mapping[str, Habit] = {habit.name: habit for habit in (*GRADIENT_HABITS, *LOSS_HABITS, *WEIGHT_HABITS)}


def habits_of(names: Iterable[str]) -> list[Habit]:
    """Returns the habits of a case, in its order."""
    return [HABITS[name] for name in names]
