"""Memory model of the persistent state of parameters: bytes that buckets and the sharded optimizer allocate."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core.communication.collectives import padded_shard_size

# Bytes per entry with AdamW: two fp32 moments, fp32 main params, fp32 gradients; and one fp32 step counter.
_MOMENTS, _MAIN, _GRADIENT, _STEPS = 8, 4, 4, 4


@dataclass(frozen=True)
class LocalParameter:
    """Local shard of a parameter on a model-parallel rank, before data parallelism shards it further.

    Attributes:
        shape: shape of the local shard.
        itemsize: bytes per entry.
        average: the axis whose ranks average its gradient (`GradientRule.average`).
        is_trained: whether an optimizer holds it.
        codes (*optional*): bytes of the local shard if it is quantized (4/8-bit).
    """

    shape: tuple[int, ...]
    itemsize: int
    average: str
    is_trained: bool = True
    codes: int | None = None

    @property
    def entries(self) -> int:
        """Number of entries of the local shard."""
        entries = 1
        for size in self.shape:
            entries *= size
        return entries


def kept_bytes(
    parameters: Iterable[LocalParameter], zero_stage: int, shards: Mapping[str, int], *, offloads: bool = False
) -> dict[str, int]:
    """Returns the bytes that the first rank keeps between steps with AdamW, by category.

    ZeRO stages 2 and 3 keep no gradients between steps; during a step they hold `gradient_bytes`.

    Args:
        zero_stage (`int`): 0 to 3.
        shards: axis of `LocalParameter.average` -> number of ranks that each own a shard of the optimizer state.
        offloads (`bool`): whether main params and moments are in host memory (`offload_optimizer`).

    Returns:
        category, as named by `memory()` of the reducer and the sharded optimizer -> bytes.
    """
    kept: Counter[str] = Counter()
    for parameter in parameters:
        ranks = shards[parameter.average]
        owned = padded_shard_size(parameter.entries, ranks)
        weights = parameter.entries
        if zero_stage == 3 and parameter.entries:
            # FSDP2 shards dim 0.
            weights = parameter.entries // parameter.shape[0] * padded_shard_size(parameter.shape[0], ranks)
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
            # A bucket's buffer `[ranks, width + parameters]` has one flag column per parameter.
            kept["gradients"] += (owned + 1) * ranks * _GRADIENT
    return {category: size for category, size in kept.items() if size}


def gradient_bytes(parameters: Iterable[LocalParameter], shards: Mapping[str, int]) -> int:
    """Returns the bytes of a rank's gradient shards, which ZeRO stages 2 and 3 hold during a step only."""
    return sum(_GRADIENT * padded_shard_size(one.entries, shards[one.average]) for one in parameters if one.is_trained)
