"""Registry of all loop patterns by name."""

from collections.abc import Iterable, Mapping

from tests.fuzz.gradient_patterns import GRADIENT_PATTERNS
from tests.fuzz.loss_patterns import LOSS_PATTERNS
from tests.fuzz.pattern import LoopPattern
from tests.fuzz.weight_patterns import WEIGHT_PATTERNS

LOOP_PATTERNS: Mapping[str, LoopPattern] = {
    loop_pattern.name: loop_pattern for loop_pattern in (*GRADIENT_PATTERNS, *LOSS_PATTERNS, *WEIGHT_PATTERNS)
}


def get_patterns(names: Iterable[str]) -> list[LoopPattern]:
    """Returns the loop patterns of a case, in its order."""
    return [LOOP_PATTERNS[name] for name in names]
