"""Registry of all loop patterns by name."""

from collections.abc import Iterable, Mapping

from tests.fuzz.gradient_patterns import GRADIENT_HABITS
from tests.fuzz.loss_patterns import LOSS_HABITS
from tests.fuzz.pattern import LoopPattern
from tests.fuzz.weight_patterns import WEIGHT_HABITS

LOOP_PATTERNS: Mapping[str, LoopPattern] = {
    loop_pattern.name: loop_pattern for loop_pattern in (*GRADIENT_HABITS, *LOSS_HABITS, *WEIGHT_HABITS)
}


def patterns_of(names: Iterable[str]) -> list[LoopPattern]:
    """Returns the loop patterns of a case, in its order."""
    return [LOOP_PATTERNS[name] for name in names]
