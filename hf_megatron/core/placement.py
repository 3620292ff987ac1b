"""How a parameter lies over the axes of a layout, and what its gradient needs; plain frozen data.

Whatever asks where entries lie (placeholders, loading, checkpoints, merging, pulls from the Hub) asks a placement and
hands it the axes; nobody else names one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from ..compat.torch_dtensor import strided_shard
from .axes import Axes, Axis

# Style of the claims of parameters that belong to an adapter.
ADAPTER = "adapter"


@dataclass(frozen=True)
class Split:
    """One dim of a tensor over one axis.

    Args:
        axis (`str`): its name in `Axes`.
        dim (`int`): the tensor dim, counted from 0.
        groups (`int`, defaults to 1): the dim consists of this many equal blocks and each of them is split, as in
            packed gate/up (2) and fused query/key/value (3).
        copies (`int`, defaults to 1): this many neighbouring ranks hold the same shard, as with fewer KV heads than
            ranks.
    """

    axis: str
    dim: int
    groups: int = 1
    copies: int = 1

    def shards(self, axes: Axes) -> int:
        """Counts the different shards."""
        return axes.size(self.axis) // self.copies

    def intervals(self, size: int, axes: Axes) -> list[tuple[int, int]]:
        """Returns the `[start, stop)` ranges that this rank holds of a dim of `size` entries, one for each block.

        Uneven sizes follow `torch.chunk`: the first ranks take `ceil(size / shards)`, the last may be empty.
        """
        block = size // self.groups
        width = -(-block // self.shards(axes))
        start = min(axes.rank(self.axis) // self.copies * width, block)
        stop = min(start + width, block)
        return [(group * block + start, group * block + stop) for group in range(self.groups)]

    def __str__(self) -> str:
        text = f"split dim {self.dim} over {self.axis}"
        if self.groups > 1:
            text += f" in {self.groups} blocks"
        if self.copies > 1:
            text += f", {self.copies} copies"
        return text


@dataclass(frozen=True)
class Placement:
    """How one parameter lies over the axes: split along some dims, repeated on every axis that no split names.

    Args:
        splits: one at most for each dim and each axis.
    """

    splits: tuple[Split, ...] = ()

    @classmethod
    def split(cls, axis: str, dim: int, *, groups: int = 1, copies: int = 1) -> "Placement":
        """Places a tensor that is split along one dim."""
        return cls((Split(axis, dim, groups, copies),))

    @property
    def is_split(self) -> bool:
        return bool(self.splits)

    def on(self, axes: Axes) -> "Placement":
        """Returns the placement without the axes that have one rank."""
        return Placement(tuple(split for split in self.splits if axes.size(split.axis) > 1))

    def intervals(self, shape: Sequence[int], axes: Axes) -> list[list[tuple[int, int]]]:
        """Returns for each dim the `[start, stop)` ranges that this rank holds of a tensor of this shape."""
        held = [[(0, size)] for size in shape]
        for split in self.splits:
            held[split.dim] = split.intervals(shape[split.dim], axes)
        return held

    def local_shape(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """Returns the shape of this rank's part of a tensor of this shape."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.intervals(shape, axes))

    def shards(self, axes: Axes) -> int:
        """Counts the different parts."""
        return math.prod(split.shards(axes) for split in self.splits)

    def split_over(self, axes: Axes) -> Axis:
        """Returns the ranks that hold a whole tensor together, those with copies of a part among them."""
        return Axis().joined(*(axes[split.axis] for split in self.splits))

    def repeated_on(self, axes: Axes) -> Axis:
        """Returns the ranks of a pipeline stage that hold the same entries."""
        splitting = [axes[split.axis].without(axes[split.axis].inner(split.copies)) for split in self.splits]
        return axes["stage"].without(*splitting)

    def dtensor_placements(self, axes: Axes, copies: int = 1) -> list[Any]:
        """Returns it in DTensor's terms, on the mesh that `ParallelMesh.of` gives with these `copies` of the model."""
        if not self.splits:
            return [Replicate()] * (1 if copies == 1 else 2)
        placements: list[Any] = []
        for split in self.splits:
            shard = Shard(split.dim) if split.groups == 1 else strided_shard(split.dim, split.groups)
            if split.copies == axes.size(split.axis) > 1:
                placements += [Replicate()] * (1 if copies == 1 else 2)
            elif split.copies > 1:
                placements += [shard, Replicate()]
            else:
                placements += [shard] * (1 if copies == 1 else 2)
        return placements

    def __str__(self) -> str:
        return ", ".join(map(str, self.splits)) or "replicated"


@dataclass(frozen=True)
class GradientRule:
    """What has to happen to a rank's gradient of a parameter before it is the whole model's gradient.

    Args:
        sum (`str`, *optional*): the axis over which it is added up in backward, because each rank of it has a part.
        copies (`int`, *optional*): only this many neighbouring ranks of that axis.
        average (`str`, defaults to `"dp"`): the axis whose ranks see other data and reduce it together, as the owners
            of its shards (`<average>_shard`) and their repetitions (`<average>_replicate`). Where a rank's gradient
            holds terms of more ranks of the batch than that, they are scaled where the weight is read in a forward.
    """

    sum: str | None = None
    copies: int | None = None
    average: str = "dp"

    def __str__(self) -> str:
        if self.sum is None:
            text = "complete"
        else:
            text = f"sum over {self.sum}" if self.copies is None else f"sum over {self.copies} copies on {self.sum}"
        return text if self.average == "dp" else f"{text}, averaged over {self.average}"


@dataclass(frozen=True)
class ParameterSharding:
    """One row of the plan: a parameter, who claimed it, where it lies and what its gradient needs."""

    name: str
    shape: tuple[int, ...]
    style: str
    placement: Placement
    gradient: GradientRule


def copies_of_model(shardings: Iterable[ParameterSharding], axes: Axes) -> int:
    """Returns how many neighbouring tp ranks share shards, if all parameters can be told so on one mesh; else 1.

    Whoever computes with parameters of several modules needs them on one mesh. DTensor cannot say in two steps how
    packed blocks are split over tp, nor sizes that come out differently when they are cut twice.
    """
    shardings = list(shardings)
    splits = [(split, sharding.shape[split.dim]) for sharding in shardings for split in sharding.placement.splits]
    size = axes.size("tp")
    found = {split.copies for split, _ in splits} - {1, size}
    if len(found) != 1 or any(split.axis != "tp" for split, _ in splits):
        return 1
    copies = found.pop()
    for split, length in splits:
        twice = [width for part in _cut(length, size // copies) for width in _cut(part, copies)]
        if split.copies == 1 and (split.groups > 1 or _cut(length, size) != twice):
            return 1
    return copies


def _cut(length: int, parts: int) -> list[int]:
    """Returns the sizes of `torch.chunk`, with zeros where it makes fewer."""
    width = -(-length // parts)
    return [max(0, min(width, length - part * width)) for part in range(parts)]
