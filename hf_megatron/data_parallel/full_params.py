"""Full tensors of sharded parameters: the entries of each rank, assembly from shards, and splitting into shards."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.axes import Axes, Axis
from ..core.placement import Placement

_Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """Entries `[start, stop)` of the flattened local tensor of a rank.

    Attributes:
        rank: world rank.
        local: index of the local tensor among the different ones (`FullParam.locals`).
        is_copy: whether a rank listed before holds the same entries.
    """

    rank: int
    local: int
    start: int
    stop: int
    is_copy: bool

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.stop - self.start


@dataclass(frozen=True)
class LocalTensor:
    """One of the local tensors that a tensor is split into over tp or ep: its shape, and its blocks.

    Attributes:
        blocks: slices in the full tensor and in the local tensor.
    """

    shape: tuple[int, ...]
    blocks: tuple[tuple[_Slices, _Slices], ...]


@dataclass(frozen=True)
class FullParam:
    """Full tensor of a parameter, on the one rank that updates it for all ranks that hold shards.

    Attributes:
        axis: the ranks that hold shards of the parameter; ranks outside of it update their own copies.
        owner: world rank that updates the parameter, and holds its optimizer state.
        shards: the entries of each rank of the axis, in its order.
        locals: the different local tensors.
        tensor: has the full shape on the owner, with memory during a step only; `[0]` on other ranks.
    """

    axis: Axis
    owner: int
    shards: tuple[Shard, ...]
    locals: tuple[LocalTensor, ...]
    tensor: Tensor

    def allocate(self) -> None:
        """Gives the tensor its memory, and a gradient of its shape; the values are undefined."""
        self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
        self.tensor.grad = torch.empty_like(self.tensor)

    def free(self) -> None:
        """Frees the memory of the tensor and of its gradient."""
        self.tensor.grad = None
        self.tensor.untyped_storage().resize_(0)

    def fill(self, target: Tensor, pieces: Iterable[tuple[Shard, Tensor]]) -> None:
        """Fills a tensor of the full shape from the entries `(size,)` of all shards that are not copies."""
        by_local: dict[int, list[tuple[Shard, Tensor]]] = {}
        for shard, piece in pieces:
            by_local.setdefault(shard.local, []).append((shard, piece))
        for index, parts in by_local.items():
            local = target.new_empty(self.locals[index].shape)
            for shard, piece in parts:
                local.view(-1)[shard.start : shard.stop].copy_(piece)
            for place, part in self.locals[index].blocks:
                target[place].copy_(local[part])

    def split(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yields each rank's shard with its entries `(size,)` of the tensor."""
        for index, described in enumerate(self.locals):
            local = self.tensor.new_empty(described.shape)
            for place, part in described.blocks:
                local[part].copy_(self.tensor[place])
            for shard in self.shards:
                if shard.local == index:
                    yield shard, local.view(-1)[shard.start : shard.stop]


def list_shards(
    shape: Sequence[int], placement: Placement, axes: Iterable[Axes], ranges: Iterable[tuple[int, int]]
) -> tuple[tuple[Shard, ...], tuple[LocalTensor, ...]]:
    """Describes the shards of a tensor of a global shape.

    Args:
        axes: the axes of each rank that holds a shard.
        ranges: the `[start, stop)` entries of the flattened local tensor that each of them holds.
    """
    shards: list[Shard] = []
    local_tensors: dict[str, int] = {}
    described: list[LocalTensor] = []
    for rank_axes, (start, stop) in zip(axes, ranges, strict=True):
        key = str(placement.intervals(shape, rank_axes))
        if key not in local_tensors:
            local_tensors[key] = len(described)
            blocks = tuple(placement.blocks(shape, rank_axes))
            described.append(LocalTensor(placement.local_shape(shape, rank_axes), blocks))
        local = local_tensors[key]
        is_copy = any((other.local, other.start, other.stop) == (local, start, stop) for other in shards)
        shards.append(Shard(rank_axes.world_rank, local, start, stop, is_copy))
    return tuple(shards), tuple(described)
