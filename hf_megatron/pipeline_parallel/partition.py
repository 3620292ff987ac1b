"""How many layers each pipeline stage holds, and what a layer costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigError


@dataclass(frozen=True)
class Stages:
    """Which layers a stage holds and which rank holds a stage.

    Args:
        ranges (`tuple[tuple[int, int], ...]`): the `[start, stop)` layers of each stage.
        rank_of (`tuple[int, ...]`): the pipeline rank of each stage.
    """

    ranges: tuple[tuple[int, int], ...]
    rank_of: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int], rank_of: Sequence[int]) -> "Stages":
        """Makes stages from the number of layers and the rank of each."""
        if len(counts) != len(rank_of):
            raise ValueError(f"{len(counts)} numbers of layers for {len(rank_of)} stages.")
        stops = tuple(accumulate(counts))
        return cls(tuple(zip((0, *stops), stops, strict=False)), tuple(rank_of))

    @property
    def ends(self) -> tuple[int, int]:
        """Returns the ranks of the first and the last stage; the first two where these are one."""
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
    """Raises `ConfigError` where a stated number of layers for each stage does not fit model and stages."""
    _check_stages(layers, stages)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ConfigError(
            f"MegatronConfig.pipeline_partition = {list(counts)}: expected {stages} numbers of 1 or more (pp_size x "
            f"virtual_stages) that add up to the model's {layers} layers, for example {list(even(layers, stages))}."
        )


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Shares layers out evenly, the rest to the first stages; raises `ConfigError` with fewer layers than stages."""
    _check_stages(layers, stages)
    share, rest = divmod(layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages))


def partition(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Returns the layers of each stage that make the most expensive stage as cheap as can be; raises as `even`.

    Every stage gets a layer. Among partitions with the same most expensive stage the sum of the squared costs is the
    smallest, which evens out the others, and then the earlier stages get more layers; so equal layers are shared out
    as by `even`.

    Args:
        costs (`Sequence[float]`): the cost of each layer, 0 or more.
        before, after (`float`, defaults to 0.0): what the first and the last stage cost besides their layers.
    """
    layers = len(costs)
    _check_stages(layers, stages)
    # Whole multiples of a common unit: sums of floats would break ties by their rounding.
    ratios = [float(cost).as_integer_ratio() for cost in (*costs, before, after)]
    unit = max(denominator for _, denominator in ratios)
    *exact, first, last = [numerator * (unit // denominator) for numerator, denominator in ratios]
    sums = (0, *accumulate(exact))

    def cost(stage: int, start: int, stop: int) -> int:
        around = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        return sums[stop] - sums[start] + around

    def stops(stage: int, start: int) -> range:
        """Returns where a stage may end, latest first: with one layer or more for it and each stage behind it."""
        latest = layers - (stages - 1 - stage)
        return range(latest, latest - 1 if stage == stages - 1 else start, -1)

    # From the last stage to the first: the lowest maximum, for every layer that a stage may start with.
    lowest = {layers: 0}
    for stage in reversed(range(stages)):
        lowest = {
            start: min(max(cost(stage, start, stop), lowest[stop]) for stop in stops(stage, start))
            for start in _starts(stage, stages, layers)
        }
    limit = lowest[0]
    # Once more with this limit: the smallest sum of squares and the counts that make it. `min` keeps the first, which
    # has the most layers in this stage.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(stages)):
        found = {}
        for start in _starts(stage, stages, layers):
            choices = [
                (cost(stage, start, stop) ** 2 + best[stop][0], (stop - start, *best[stop][1]))
                for stop in stops(stage, start)
                if stop in best and cost(stage, start, stop) <= limit
            ]
            if choices:
                found[start] = min(choices, key=lambda choice: choice[0])
        best = found
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
