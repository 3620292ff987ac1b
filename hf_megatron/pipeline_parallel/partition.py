"""Partition of layers into pipeline stages: evenly, or by their costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigError


@dataclass(frozen=True)
class Stages:
    """Layers of each stage, and the rank that holds it.

    Args:
        ranges (`tuple[tuple[int, int], ...]`): the `[start, stop)` layers of each stage.
        rank_of (`tuple[int, ...]`): the pipeline rank of each stage.
    """

    ranges: tuple[tuple[int, int], ...]
    rank_of: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int], rank_of: Sequence[int]) -> "Stages":
        """Creates stages from the number of layers and the rank of each."""
        if len(counts) != len(rank_of):
            raise ValueError(f"{len(counts)} layer counts for {len(rank_of)} stages.")
        stops = tuple(accumulate(counts))
        return cls(tuple(zip((0, *stops), stops, strict=False)), tuple(rank_of))

    @property
    def ends(self) -> tuple[int, int]:
        """Ranks of the first and the last stage; `(0, 1)` if one rank holds both (V-shaped schedules)."""
        return (self.rank_of[0], self.rank_of[-1]) if self.rank_of[0] != self.rank_of[-1] else (0, 1)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def get_layer_stage(self, layer: int) -> int:
        """Returns the stage that holds a layer."""
        for stage, (start, stop) in enumerate(self.ranges):
            if start <= layer < stop:
                return stage
        raise IndexError(f"layer {layer} of {self.ranges[-1][1]}")


def check_partition(counts: Sequence[int], layers: int, stages: int) -> None:
    """Raises `ConfigError` if the number of layers of each stage does not fit the model and the stages."""
    _check_stages(layers, stages)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ConfigError(
            f"MegatronConfig.pipeline_partition = {list(counts)}: expected {stages} positive integers (pp_size x "
            f"virtual_stages) that sum to the model's {layers} layers, for example {list(even(layers, stages))}."
        )


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Returns an even partition, with the remainder on the first stages; raises `ConfigError` for too many stages."""
    _check_stages(layers, stages)
    share, rest = divmod(layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages))


def partition(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Returns the number of layers of each stage that minimizes the cost of the most expensive stage.

    Every stage gets a layer. Ties are resolved by the smallest sum of squared costs, which balances the other stages,
    and then in favor of more layers on earlier stages; so equal costs give the partition of `even`.

    Args:
        costs (`Sequence[float]`): cost of each layer, 0 or more.
        before, after (`float`, defaults to 0.0): cost of the first and the last stage in addition to their layers.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    layers = len(costs)
    _check_stages(layers, stages)
    # Integer multiples of a common unit: rounding of float sums would decide ties.
    ratios = [float(cost).as_integer_ratio() for cost in (*costs, before, after)]
    unit = max(denominator for _, denominator in ratios)
    *exact, first, last = [numerator * (unit // denominator) for numerator, denominator in ratios]
    sums = (0, *accumulate(exact))

    def cost(stage: int, start: int, stop: int) -> int:
        around = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        return sums[stop] - sums[start] + around

    def stops(stage: int, start: int) -> range:
        """Returns where a stage may end, latest first, so that it and each later stage have at least one layer."""
        latest = layers - (stages - 1 - stage)
        return range(latest, latest - 1 if stage == stages - 1 else start, -1)

    # Dynamic programming from the last stage to the first: start layer -> lowest maximum over the remaining stages.
    lowest = {layers: 0}
    for stage in reversed(range(stages)):
        lowest = {
            start: min(max(cost(stage, start, stop), lowest[stop]) for stop in stops(stage, start))
            for start in _starts(stage, stages, layers)
        }
    limit = lowest[0]
    # Second pass under this limit: start layer -> smallest sum of squares and its counts. `min` keeps the first of
    # equal choices, which has the most layers in this stage.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(stages)):
        candidates = {}
        for start in _starts(stage, stages, layers):
            choices = [
                (cost(stage, start, stop) ** 2 + best[stop][0], (stop - start, *best[stop][1]))
                for stop in stops(stage, start)
                if stop in best and cost(stage, start, stop) <= limit
            ]
            if choices:
                candidates[start] = min(choices, key=lambda choice: choice[0])
        best = candidates
    return best[0][1]


def _starts(stage: int, stages: int, layers: int) -> range:
    """Returns the layers that a stage may start with when every stage has one."""
    return range(1) if stage == 0 else range(stage, layers - (stages - stage) + 1)


def _check_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"MegatronConfig.pp_size x virtual_stages = {stages}: expected 1 to {layers} stages, one for each of the "
            f"model's {layers} layers at most."
        )
