"""Rank layout: the axes and each rank's position on them, computed without a process group.

    world = tp x cp x pp x dp, tp innermost, dp outermost
    dp    = dp_shard x dp_replicate                         ranks that shard state, and replicas of them
    dp_cp = dp x cp                                         ranks that see different parts of one batch
    cp    = cp_inner x cp_outer                             neighbors that exchange heads, and rings of them
    tp x cp x dp of one pipeline stage = etp x ep x edp     the same ranks, as experts see them

transformers' own mesh and Megatron's default put pp outermost; here dp is outermost, so that the data arithmetic of
Trainer and Accelerate holds unchanged: neighboring ranks share a batch.

An axis is a list of digits, innermost first. The value of a digit `(stride, size)` for a rank is `rank // stride %
size`, so axes are split, joined and subtracted by arithmetic on strides: tp2 x pp2 x dp2 has the digits (1, 2), (2,
2), (4, 2), and ep 4 within one of its stages has (1, 2), (4, 2).
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..config import MegatronConfig
from ..errors import ConfigError

# Axes whose ranks form one data-parallel replica and share a batch, the innermost first.
REPLICA_AXES = ("tp", "cp", "pp")

Digit = tuple[int, int]


def _in_normal_form(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """Returns the digits innermost first, adjacent ones merged, and without digits of size 1."""
    joined: list[Digit] = []
    for stride, size in sorted(digit for digit in digits if digit[1] > 1):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0], joined[-1][1] * size
        else:
            joined.append((stride, size))
    return tuple(joined)


@dataclass(frozen=True)
class Axis:
    """Set of ranks that differ in some digits and agree in all others.

    Args:
        digits: `(stride, size)` pairs in any order.
    """

    digits: tuple[Digit, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "digits", _in_normal_form(self.digits))

    @cached_property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return math.prod(size for _, size in self.digits)

    def rank(self, world_rank: int) -> int:
        """Returns the position of a world rank on the axis."""
        place, weight = 0, 1
        for stride, size in self.digits:
            place += world_rank // stride % size * weight
            weight *= size
        return place

    def ranks(self, world_rank: int) -> tuple[int, ...]:
        """Returns the world ranks on the axis through `world_rank`, in the axis's order."""
        origin = world_rank - sum(world_rank // stride % size * stride for stride, size in self.digits)
        steps = [[stride * index for index in range(size)] for stride, size in reversed(self.digits)]
        return tuple(origin + sum(offsets) for offsets in itertools.product(*steps))

    def joined(self, *others: "Axis") -> "Axis":
        """Joins this axis and others that have no digit in common with it."""
        return Axis(tuple(digit for axis in (self, *others) for digit in axis.digits))

    def inner(self, size: int) -> "Axis":
        """Returns the innermost `size` ranks as an axis; raises `ConfigError` if `size` does not divide the axis."""
        digits, left = [], size
        for stride, extent in self.digits:
            taken = min(extent, left)
            if extent % taken or left % taken:
                break
            digits.append((stride, taken))
            left //= taken
        if left != 1:
            raise ConfigError(f"{size} does not divide the axis of {self.size} ranks.")
        return Axis(tuple(digits))

    def without(self, *others: "Axis") -> "Axis":
        """Removes other axes, each contained in this one, from the axis."""
        digits = list(self.digits)
        for stride, size in (digit for axis in others for digit in axis.digits):
            digits = [part for digit in digits for part in _difference(digit, (stride, size))]
        return Axis(tuple(digits))

    def common(self, other: "Axis") -> "Axis":
        """Returns the intersection with another axis."""
        return self.without(self.without(other))


def _difference(digit: Digit, other: Digit) -> Iterator[Digit]:
    """Yields the parts of a digit below and above another one."""
    (start, size), (first, count) = digit, other
    end, last = start * size, first * count
    low, high = max(start, first), min(end, last)
    if low >= high:
        yield digit
        return
    if low % start or end % high:
        raise ValueError(f"the digits {digit} and {other} cross")
    yield start, low // start
    yield high, end // high


def _filled(size: int, *axes: Axis) -> Axis:
    """Fills an axis of `size` ranks from other axes, using up each one before the next."""
    parts, left = [], size
    for axis in axes:
        taken = min(left, axis.size)
        if left % taken or axis.size % taken:
            break
        parts.append(axis.inner(taken))
        left //= taken
    if left != 1:
        raise ConfigError(
            f"ep_size = {size} is not supported: expert-parallel ranks are taken from tp, then cp, then dp, here "
            f"{' x '.join(str(axis.size) for axis in axes)}. Use a divisor or a multiple of each in turn, such as "
            f"{math.prod(axis.size for axis in axes)} (all ranks) or 1."
        )
    return Axis().joined(*parts)


@dataclass(frozen=True)
class Axes:
    """Axes of a layout, and one rank's position on them.

    Args:
        world_rank (`int`): the rank.
        named: `(name, axis)` pairs.
    """

    world_rank: int
    named: tuple[tuple[str, Axis], ...]

    @classmethod
    def of(cls, config: MegatronConfig, world_rank: int) -> "Axes":
        """Creates the axes of a layout, with `dp_size` 1 by default; raises `ConfigError` if sizes do not fit."""
        dp_size = config.dp_size or 1
        replicas = config.dp_replicate_size
        if dp_size % replicas:
            raise ConfigError(f"MegatronConfig.dp_replicate_size = {replicas}: does not divide dp_size = {dp_size}.")
        # ZeRO stage 0 shards no state: every rank is a replica.
        copies = None if config.zero_stage == 0 else replicas
        world_size = config.ranks_per_replica * dp_size
        if not 0 <= world_rank < world_size:
            raise ConfigError(
                f"rank = {world_rank} is out of range: the layout {config.layout()} has ranks 0 to {world_size - 1}."
            )
        sizes = {"tp": config.tp_size, "cp": config.cp_size, "pp": config.pp_size, "dp": dp_size}
        inner = (config.hierarchical_context_parallel_sizes or (1,))[0]
        experts = {"ep": config.ep_size, "etp": (config.etp_size or 1) if config.ep_size > 1 else 1}
        return cls.from_sizes(world_rank, **experts, dp_replicate=copies, cp_inner=inner, **sizes)

    @classmethod
    def from_sizes(
        cls,
        world_rank: int,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        dp: int = 1,
        etp: int = 1,
        ep: int = 1,
        dp_replicate: int | None = 1,
        cp_inner: int = 1,
    ) -> "Axes":
        """Creates the axes of a layout from sizes; raises `ConfigError` if they do not divide each other.

        Args:
            etp, ep (`int`, defaults to 1): expert axes within tp x cp x dp; experts split over etp x ep ranks are
                replicated over edp. ep takes the ranks of tp that etp leaves, then cp, then dp.
            dp_replicate (`int`, *optional*, defaults to 1): number of replicas of the state that is sharded over the
                other dp ranks; `None` shards nothing, not over cp either.
            cp_inner (`int`, defaults to 1): number of neighboring cp ranks that exchange heads.
        """
        axes: dict[str, Axis] = {}
        stride = 1
        for name, size in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp)):
            axes[name] = Axis(((stride, size),))
            stride *= size
        axes["cp_inner"] = axes["cp"].inner(cp_inner)
        axes["cp_outer"] = axes["cp"].without(axes["cp_inner"])
        stage = axes["tp"].joined(axes["cp"], axes["dp"])
        if etp not in (1, tp):
            raise ConfigError(f"etp_size = {etp}: expected 1 or tp_size = {tp}.")
        axes["etp"] = axes["tp"].inner(etp)
        axes["ep"] = _filled(ep, axes["tp"].without(axes["etp"]), axes["cp"], axes["dp"])
        axes["edp"] = stage.without(axes["etp"], axes["ep"])
        # Ranks that process parts of one batch: the loss denominator sums their target counts.
        axes["dp_cp"] = axes["dp"].joined(axes["cp"])
        replicas = stage if dp_replicate is None else axes["dp"].without(axes["dp"].inner(dp // dp_replicate))
        for name in ("dp", "dp_cp", "edp"):
            axes[f"{name}_replicate"] = axes[name].common(replicas)
            axes[f"{name}_shard"] = axes[name].without(replicas)
        axes["stage"] = stage
        axes["world"] = stage.joined(axes["pp"])
        return cls(world_rank, tuple(axes.items()))

    def with_axis(self, name: str, axis: Axis) -> "Axes":
        """Returns these axes with one more."""
        return Axes(self.world_rank, (*self.named, (name, axis)))

    def of_rank(self, world_rank: int) -> "Axes":
        """Returns the same axes for another rank."""
        return Axes(world_rank, self.named)

    @cached_property
    def _by_name(self) -> dict[str, Axis]:
        return dict(self.named)

    def __getitem__(self, name: str) -> Axis:
        if name not in self._by_name:
            raise KeyError(f"no axis {name!r}; there are {', '.join(self._by_name)}")
        return self._by_name[name]

    def size(self, name: str) -> int:
        """Returns the number of ranks on an axis."""
        return self[name].size

    def rank(self, name: str) -> int:
        """Returns this rank's position on an axis."""
        return self[name].rank(self.world_rank)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Returns the world ranks on an axis through this rank, in the axis's order."""
        return self[name].ranks(self.world_rank)

    def neighbour(self, name: str, step: int = 1) -> int:
        """Returns the world rank `step` positions along an axis, treated as a ring."""
        ranks = self.ranks(name)
        return ranks[(self.rank(name) + step) % len(ranks)]

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Returns all groups of ranks along an axis, in the order of their first ranks."""
        axis = self[name]
        return list(dict.fromkeys(axis.ranks(rank) for rank in range(self.size("world"))))
