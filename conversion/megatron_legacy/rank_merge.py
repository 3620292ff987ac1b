"""Merging of rank shards into global tensors, read from their files on demand."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.io.buffer_pool import Memory
from ...core.io.checksums import CHUNK
from ...core.io.safetensors import TensorMeta
from ...errors import CheckpointError
from ..interfaces import same_bytes
from ..megatron.splits import RankSplit, rank_views
from ..torch_files.torch_save import StoredTensor
from .ranks import RankFile


class RankShard(NamedTuple):
    """A tensor in a rank's file; `expert` is the index and count of experts if the tensor holds several."""

    file: RankFile
    chunk: int
    key: str
    expert: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.key} in {self.file.path}"

    @property
    def stored(self) -> StoredTensor:
        """Location of the tensor; one of several experts is stored transposed (moe/experts.py, GroupedMLP.forward)."""
        stored = self.file.chunks[self.chunk][self.key]
        if self.expert is None:
            return stored
        index, count = self.expert
        first, second = stored.shape if len(stored.shape) == 2 else (0, 0)
        # Experts are contiguous in memory, whatever the shape of the tensor.
        shape = (first, second // count) if self.key.endswith("weight1") else (first // count, second)
        if stored.stride != (second, 1) or not first * second == shape[0] * shape[1] * count > 0:
            raise CheckpointError(f"{self} cannot be split into {count} experts of equal size.")
        return replace(stored, shape=shape, stride=(shape[1], 1), offset=stored.offset + index * shape[0] * shape[1])

    def entry(self) -> TensorMeta:
        """Returns the shape and dtype of the tensor that is read."""
        stored = self.stored
        return TensorMeta(stored.shape if self.expert is None else stored.shape[::-1], stored.dtype)

    def read_into(self, starts: Sequence[int], out: Tensor) -> None:
        """Copies the box of the tensor that begins at `starts` into `out`, of any shape."""
        if self.expert is None:
            self.file.blob.read_into(self.stored, starts, out)
        else:
            expert_weight = self.file.blob.read(self.stored).T
            out.copy_(expert_weight[tuple(slice(s, s + length) for s, length in zip(starts, out.shape, strict=True))])


@dataclass
class MergedTensor:
    """The shards that make up a global tensor.

    Attributes:
        split: sharding, of a single expert's tensor if there are several.
        pieces: shards of the tensor-parallel ranks, one list per expert or a single list.
        copies: pairs of shards that must be equal.
    """

    split: RankSplit | None
    experts: bool
    pieces: list[list[RankShard]]
    copies: list[tuple[RankShard, RankShard]] = field(default_factory=list)

    def entry(self) -> TensorMeta:
        """Returns the global shape and dtype; raises if the shards of ranks do not fit each other."""
        first = self.pieces[0][0].entry()
        for piece in (piece for ranks in self.pieces for piece in ranks):
            if piece.entry() != first:
                raise CheckpointError(f"{piece}: {piece.entry()}, but another rank has {first}.")
        shape = list(first.shape)
        if self.split is not None:
            if len(shape) <= self.split.dim:
                raise CheckpointError(f"{self.pieces[0][0]} has too few dimensions to be split: shape {first.shape}.")
            shape[self.split.dim] *= len(self.pieces[0])
        return TensorMeta((len(self.pieces), *shape) if self.experts else tuple(shape), first.dtype)

    @property
    def piece_length(self) -> int:
        """Length of a rank's shard in the split dim, 0 if the tensor is not split."""
        return self.pieces[0][0].entry().shape[self.split.dim] if self.split is not None else 0

    def read(self, name: str, blocks: Sequence[int], memory: Memory) -> Tensor:
        """Reads the global tensor, of any shape; ranks split each of `blocks` separately.

        Raises:
            CheckpointError: copies differ, or a file is damaged.
        """
        for first, other in self.copies:
            if not _equal(first, other):
                raise CheckpointError(f"{name}: {first} and {other} should be copies but differ.")
        entry = self.entry()
        merged = memory.empty(entry.shape, entry.dtype)
        for index, ranks in enumerate(self.pieces):
            _merge(merged[index] if self.experts else merged, self.split, ranks, blocks)
        return merged


def _merge(target: Tensor, split: RankSplit | None, ranks: Sequence[RankShard], blocks: Sequence[int]) -> None:
    """Reads each rank's shard into its position in the global tensor."""
    for rank, piece in enumerate(ranks):
        views = (target,) if split is None else rank_views(target, split, rank, len(ranks), blocks)
        starts = [0] * target.dim()
        for view in views:
            piece.read_into(starts, view)
            if split is not None:
                starts[split.dim] += view.shape[split.dim]


def _equal(first: RankShard, second: RankShard) -> bool:
    """Compares bytes, so that NaN equals itself; a few rows at a time to bound memory."""
    entry = first.entry()
    if entry != second.entry():
        return False
    rows = entry.shape[0] if first.expert else max(CHUNK // max(entry.nbytes // max(entry.shape[0], 1), 1), 1)
    for start in range(0, entry.shape[0], rows):
        shape = (min(rows, entry.shape[0] - start), *entry.shape[1:])
        parts = [torch.empty(shape, dtype=entry.dtype) for _ in range(2)]
        for piece, part in zip((first, second), parts, strict=True):
            piece.read_into([start] + [0] * (len(shape) - 1), part)
        if not same_bytes(*parts):
            return False
    return True
