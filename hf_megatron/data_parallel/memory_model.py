"""How many bytes a rank keeps of a parameter from step to step: what buckets and the sharded optimizer allocate."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core.communication.collectives import share

# AdamW: two moments of fp32, and one number that counts its steps.
_MOMENTS, _MAIN, _GRADIENT, _STEPS = 8, 4, 4, 4


@dataclass(frozen=True)
class LocalParameter:
    """What a rank holds of a parameter by all axes but those of data.

    Attributes:
        shape: of its part.
        itemsize: bytes of an entry.
        average: the axis whose ranks share it (`GradientRule.average`).
        is_trained: whether an optimizer has it.
        codes (*optional*): bytes of its part where that is kept in few bits.
    """

    shape: tuple[int, ...]
    itemsize: int
    average: str
    is_trained: bool = True
    codes: int | None = None

    @property
    def entries(self) -> int:
        """Numbers of its part."""
        entries = 1
        for size in self.shape:
            entries *= size
        return entries


def kept_bytes(
    parameters: Iterable[LocalParameter], zero_stage: int, shards: Mapping[str, int], *, offloads: bool = False
) -> dict[str, int]:
    """Returns category -> bytes that the first rank keeps of parameters with AdamW, as `memory()` of both names them.

    Stages 2 and 3 keep no gradients from step to step; while one runs they have those of what a rank owns.

    Args:
        zero_stage (`int`): 0 to 3.
        shards: axis of `LocalParameter.average` -> ranks that each own a part of its optimizer state.
        offloads (`bool`): whether main weights and moments are in the host's memory (`offload_optimizer`).
    """
    kept: Counter[str] = Counter()
    for parameter in parameters:
        ranks = shards[parameter.average]
        owned = share(parameter.entries, ranks)
        weights = parameter.entries
        if zero_stage == 3 and parameter.entries:
            # FSDP2 splits the first dim.
            weights = parameter.entries // parameter.shape[0] * share(parameter.shape[0], ranks)
        kept["weights"] += weights * parameter.itemsize if parameter.codes is None else parameter.codes
        if not parameter.is_trained:
            continue
        if zero_stage == 3:
            owned = weights
        if not offloads:
            if parameter.itemsize < _MAIN:
                kept["main weights"] += owned * _MAIN
            kept["moments"] += owned * _MOMENTS + _STEPS
        if zero_stage < 2:
            # Rows of all who share it end in a column that counts who has a gradient.
            kept["gradients"] += (owned + 1) * ranks * _GRADIENT
    return {category: size for category, size in kept.items() if size}


def gradient_bytes(parameters: Iterable[LocalParameter], shards: Mapping[str, int]) -> int:
    """Returns the bytes of gradients of what a rank owns; stages 2 and 3 have them beside `kept_bytes` in a step."""
    return sum(_GRADIENT * share(one.entries, shards[one.average]) for one in parameters if one.is_trained)
