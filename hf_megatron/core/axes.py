"""Where every rank of a layout sits, told without a process group.

    world = tp x cp x pp x dp, tp innermost, dp outermost
    dp    = dp_shard x dp_replicate                         ranks that share state, and repetitions of them
    dp_cp = dp x cp                                         ranks that see parts of one batch of data
    cp    = cp_inner x cp_outer                             neighbours that exchange heads, and rings of them
    tp x cp x dp of one pipeline stage = etp x ep x edp     the same ranks, as experts see them

transformers' own mesh and Megatron's default put pp outermost; dp is outermost here because Trainer's and
Accelerate's data arithmetic then holds unchanged: neighbouring ranks share a batch.

An axis is a list of digits, innermost first. A digit `(stride, size)` of a rank's number is `rank // stride % size`, so
that axes are cut, joined and taken out of each other by arithmetic on strides: tp2 x pp2 x dp2 is the digits (1, 2),
(2, 2), (4, 2), and ep 4 within a stage of it is (1, 2), (4, 2).
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..config import MegatronConfig
from ..errors import ConfigError

Digit = tuple[int, int]


def _in_normal_form(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """Digits innermost first, without those of size 1, neighbours made one."""
    joined: list[Digit] = []
    for stride, size in sorted(digit for digit in digits if digit[1] > 1):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0], joined[-1][1] * size
        else:
            joined.append((stride, size))
    return tuple(joined)


@dataclass(frozen=True)
class Axis:
    """Ranks that differ in some digits of their number and agree in all others.

    Args:
        digits: `(stride, size)` pairs; their order does not matter.
    """

    digits: tuple[Digit, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "digits", _in_normal_form(self.digits))

    @cached_property
    def size(self) -> int:
        """Ranks on the axis."""
        return math.prod(size for _, size in self.digits)

    def rank(self, world_rank: int) -> int:
        """Returns where a rank of the world sits on the axis."""
        place, weight = 0, 1
        for stride, size in self.digits:
            place += world_rank // stride % size * weight
            weight *= size
        return place

    def ranks(self, world_rank: int) -> tuple[int, ...]:
        """Returns the ranks of the world on the axis through a rank, in the axis's order."""
        origin = world_rank - sum(world_rank // stride % size * stride for stride, size in self.digits)
        steps = [[stride * index for index in range(size)] for stride, size in reversed(self.digits)]
        return tuple(origin + sum(offsets) for offsets in itertools.product(*steps))

    def joined(self, *others: "Axis") -> "Axis":
        """Joins this axis and others that have no rank in common with it."""
        return Axis(tuple(digit for axis in (self, *others) for digit in axis.digits))

    def inner(self, size: int) -> "Axis":
        """Cuts out the innermost `size` ranks; raises `ConfigError` where `size` does not divide the axis."""
        digits, left = [], size
        for stride, unsharded in self.digits:
            taken = min(unsharded, left)
            if unsharded % taken or left % taken:
                break
            digits.append((stride, taken))
            left //= taken
        if left != 1:
            raise ConfigError(f"{size} ranks cannot be cut from an axis of {self.size}.")
        return Axis(tuple(digits))

    def without(self, *others: "Axis") -> "Axis":
        """Takes others, each a part of the axis, out of it."""
        digits = list(self.digits)
        for stride, size in (digit for axis in others for digit in axis.digits):
            digits = [part for digit in digits for part in _difference(digit, (stride, size))]
        return Axis(tuple(digits))

    def common(self, other: "Axis") -> "Axis":
        """Returns the part of the axis that is a part of the other one too."""
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
    """Fills an axis of `size` ranks from others, using each up before the next is begun."""
    parts, left = [], size
    for axis in axes:
        taken = min(left, axis.size)
        if left % taken or axis.size % taken:
            break
        parts.append(axis.inner(taken))
        left //= taken
    if left != 1:
        raise ConfigError(
            f"ep_size = {size}: it takes the ranks of tp, then cp, then dp, here "
            f"{' x '.join(str(axis.size) for axis in axes)}, and has to divide or be a multiple of each: 1 to "
            f"{math.prod(axis.size for axis in axes)}, such as that of all."
        )
    return Axis().joined(*parts)


@dataclass(frozen=True)
class Axes:
    """The axes of a layout, and one rank's place on them.

    Args:
        world_rank (`int`): the rank.
        named: `(name, axis)` pairs.
    """

    world_rank: int
    named: tuple[tuple[str, Axis], ...]

    @classmethod
    def of(cls, config: MegatronConfig, world_rank: int) -> "Axes":
        """Makes the axes of a layout, `dp_size` 1 unless stated; raises `ConfigError` for what does not fit."""
        dp_size = config.dp_size or 1
        replicas = config.dp_replicate_size
        if dp_size % replicas:
            raise ConfigError(f"MegatronConfig.dp_replicate_size = {replicas}: does not divide dp_size = {dp_size}.")
        # Stage 0 shares nothing: every rank repeats the others.
        copies = None if config.zero_stage == 0 else replicas
        world_size = config.ranks_per_replica * dp_size
        if not 0 <= world_rank < world_size:
            raise ConfigError(f"rank = {world_rank}: the layout {config.layout()} has the ranks 0 to {world_size - 1}.")
        sizes = {"tp": config.tp_size, "cp": config.cp_size, "pp": config.pp_size, "dp": dp_size}
        inner = (config.hierarchical_context_parallel_sizes or (1,))[0]
        experts = {"ep": config.ep_size, "etp": (config.etp_size or 1) if config.ep_size > 1 else 1}
        return cls.of_sizes(world_rank, **experts, dp_replicate=copies, cp_inner=inner, **sizes)

    @classmethod
    def of_sizes(
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
        """Makes the axes of a layout of these sizes; raises `ConfigError` where they do not divide each other.

        Args:
            etp, ep (`int`, defaults to 1): of tp x cp x dp; experts split over etp x ep ranks are repeated on edp.
                ep fills what etp leaves of tp first, then cp, then dp.
            dp_replicate (`int`, *optional*, defaults to 1): repetitions of what the other dp ranks share; with `None`
                nothing is shared, over cp neither.
            cp_inner (`int`, defaults to 1): neighbours of cp that exchange heads.
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
        # Ranks that see parts of one batch of data, whose targets make one denominator.
        axes["dp_cp"] = axes["dp"].joined(axes["cp"])
        replicas = stage if dp_replicate is None else axes["dp"].without(axes["dp"].inner(dp // dp_replicate))
        for name in ("dp", "dp_cp", "edp"):
            axes[f"{name}_replicate"] = axes[name].common(replicas)
            axes[f"{name}_shard"] = axes[name].without(replicas)
        axes["stage"] = stage
        axes["world"] = stage.joined(axes["pp"])
        return cls(world_rank, tuple(axes.items()))

    def with_axis(self, name: str, axis: Axis) -> "Axes":
        """Returns these axes and another one."""
        return Axes(self.world_rank, (*self.named, (name, axis)))

    def of_rank(self, world_rank: int) -> "Axes":
        """Returns the same axes as another rank sees them."""
        return Axes(world_rank, self.named)

    @cached_property
    def _by_name(self) -> dict[str, Axis]:
        return dict(self.named)

    def __getitem__(self, name: str) -> Axis:
        if name not in self._by_name:
            raise KeyError(f"no axis {name!r}; there are {', '.join(self._by_name)}")
        return self._by_name[name]

    def size(self, name: str) -> int:
        """Counts the ranks on an axis."""
        return self[name].size

    def rank(self, name: str) -> int:
        """Returns this rank's place on an axis."""
        return self[name].rank(self.world_rank)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Returns the ranks of the world on an axis through this rank, in the axis's order."""
        return self[name].ranks(self.world_rank)

    def neighbour(self, name: str, step: int = 1) -> int:
        """Returns the rank of the world some steps along an axis, which is a ring."""
        ranks = self.ranks(name)
        return ranks[(self.rank(name) + step) % len(ranks)]

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Lists every group of ranks along an axis, in the order of their first ranks."""
        axis = self[name]
        return list(dict.fromkeys(axis.ranks(rank) for rank in range(self.size("world"))))
