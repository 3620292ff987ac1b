"""Placement of a parameter over the axes of a layout, and the reduction rule of its gradient; frozen data only.

All code that needs the location of entries (placeholders, loading, checkpoints, merging, pulls from the Hub) derives
it from a placement and the axes; no other code refers to axes for this.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from ..compat.torch_dtensor import strided_shard
from .axes import Axes, Axis

# Style of adapter parameters.
ADAPTER = "adapter"


@dataclass(frozen=True)
class Split:
    """Split of one tensor dim over one axis.

    Args:
        axis (`str`): name of the axis in `Axes`.
        dim (`int`): the tensor dim, counted from 0.
        groups (`int`, defaults to 1): number of equal blocks in the dim; each block is split, as in packed gate/up
            (2) and fused query/key/value (3).
        copies (`int`, defaults to 1): number of neighboring ranks that hold the same shard, as with fewer KV heads
            than ranks.
    """

    axis: str
    dim: int
    groups: int = 1
    copies: int = 1

    def shards(self, axes: Axes) -> int:
        """Returns the number of distinct shards."""
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
    """Placement of one parameter over the axes: split along some dims, replicated over all axes without a split.

    Args:
        splits: at most one per dim and per axis.
    """

    splits: tuple[Split, ...] = ()

    @classmethod
    def split(cls, axis: str, dim: int, *, groups: int = 1, copies: int = 1) -> "Placement":
        """Returns the placement of a tensor that is split along one dim."""
        return cls((Split(axis, dim, groups, copies),))

    @property
    def is_split(self) -> bool:
        return bool(self.splits)

    def on(self, axes: Axes) -> "Placement":
        """Returns the placement without splits over axes of size 1."""
        return Placement(tuple(split for split in self.splits if axes.size(split.axis) > 1))

    def intervals(self, shape: Sequence[int], axes: Axes) -> list[list[tuple[int, int]]]:
        """Returns for each dim the `[start, stop)` ranges that this rank holds of a tensor of this shape."""
        held = [[(0, size)] for size in shape]
        for split in self.splits:
            held[split.dim] = split.intervals(shape[split.dim], axes)
        return held

    def local_shape(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """Returns the shape of this rank's local shard of a tensor of this shape."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.intervals(shape, axes))

    def blocks(self, shape: Sequence[int], axes: Axes) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yields each contiguous block of this rank's shard: its slices in the full tensor and in the shard."""
        dims: list[list[tuple[slice, slice]]] = []
        for intervals in self.intervals(shape, axes):
            ends = itertools.accumulate(stop - start for start, stop in intervals)
            both = zip(intervals, ends, strict=True)
            dims.append([(slice(start, stop), slice(end - stop + start, end)) for (start, stop), end in both])
        for box in itertools.product(*dims):
            yield tuple(place for place, _ in box), tuple(part for _, part in box)

    def shards(self, axes: Axes) -> int:
        """Returns the number of distinct shards."""
        return math.prod(split.shards(axes) for split in self.splits)

    def split_over(self, axes: Axes) -> Axis:
        """Returns the axis over which the tensor is split, including the ranks that hold copies of a shard."""
        return Axis().joined(*(axes[split.axis] for split in self.splits))

    def repeated_on(self, axes: Axes) -> Axis:
        """Returns the ranks of a pipeline stage that hold the same entries as this rank."""
        splitting = [axes[split.axis].without(axes[split.axis].inner(split.copies)) for split in self.splits]
        return axes["stage"].without(*splitting)

    def dtensor_placements(self, axes: Axes, copies: int = 1) -> list[Any]:
        """Returns the DTensor placements on the mesh of `ParallelMesh.of` with the same `copies`."""
        # With copies the tp axis is two mesh dims (shards, copies), so a placement over both appears twice.
        mesh_dims = 1 if copies == 1 else 2
        if not self.splits:
            return [Replicate()] * mesh_dims
        placements: list[Any] = []
        for split in self.splits:
            shard = Shard(split.dim) if split.groups == 1 else strided_shard(split.dim, split.groups)
            if split.copies == axes.size(split.axis) > 1:
                # All ranks of the axis hold the same shard.
                placements += [Replicate()] * mesh_dims
            elif split.copies > 1:
                placements += [shard, Replicate()]
            else:
                placements += [shard] * mesh_dims
        return placements

    def __str__(self) -> str:
        return ", ".join(map(str, self.splits)) or "replicated"


@dataclass(frozen=True)
class GradientRule:
    """Reduction that turns a rank's gradient of a parameter into the gradient of the full model.

    Args:
        sum (`str`, *optional*): axis over which the gradient is all-reduced in backward, because each of its ranks
            holds a partial gradient.
        copies (`int`, *optional*): restricts the sum to groups of this many neighboring ranks of the axis.
        average (`str`, defaults to `"dp_cp"`): data axis of the ranks that average the gradient: it is
            reduce-scattered over `<average>_shard` and all-reduced over `<average>_replicate`. If a rank's gradient
            already contains terms of further data ranks, it is scaled where the forward reads the weight. Axes of size
            1 vanish, so the default holds with and without cp.
    """

    sum: str | None = None
    copies: int | None = None
    average: str = "dp_cp"

    def __str__(self) -> str:
        if self.sum is None:
            text = "complete"
        else:
            text = f"sum over {self.sum}" if self.copies is None else f"sum over {self.copies} copies on {self.sum}"
        return text if self.average == "dp_cp" else f"{text}, averaged over {self.average}"


@dataclass(frozen=True)
class ParameterSharding:
    """Sharding of one parameter in the plan: its style, placement and gradient rule."""

    name: str
    shape: tuple[int, ...]
    style: str
    placement: Placement
    gradient: GradientRule


def count_shared_copies(shardings: Iterable[ParameterSharding], axes: Axes) -> int:
    """Returns the number of neighboring tp ranks that share shards, if one mesh can describe all parameters; else 1.

    Code that combines parameters of several modules needs them on one mesh. DTensor cannot express packed blocks whose
    split over tp is done in two steps, nor sizes that change if they are split twice.
    """
    shardings = list(shardings)
    splits = [(split, sharding.shape[split.dim]) for sharding in shardings for split in sharding.placement.splits]
    size = axes.size("tp")
    copy_counts = {split.copies for split, _ in splits} - {1, size}
    if len(copy_counts) != 1 or any(split.axis != "tp" for split, _ in splits):
        return 1
    copies = copy_counts.pop()
    for split, length in splits:
        twice = [width for part in _cut(length, size // copies) for width in _cut(part, copies)]
        if split.copies == 1 and (split.groups > 1 or _cut(length, size) != twice):
            return 1
    return copies


def _cut(length: int, parts: int) -> list[int]:
    """Returns the chunk sizes of `torch.chunk`, padded with zeros to `parts` chunks."""
    width = -(-length // parts)
    return [max(0, min(width, length - part * width)) for part in range(parts)]
