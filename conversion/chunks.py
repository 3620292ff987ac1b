"""Global tensors stored in chunks: which chunks make up a tensor, and reading any box of it from them."""

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_chunks import TensorChunk, check_boxes, overlaps
from ..core.io.buffer_pool import FRESH, Memory
from ..core.io.safetensors import TensorMeta
from ..errors import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values are stored."""

    box: TensorChunk
    place: Any


class ChunkedTensors(ABC):
    """Tensors that are each stored in chunks covering them exactly.

    Args:
        where: the file that describes them, for errors.
        tensors: shape, dtype and chunks of each.

    Attributes:
        entries: global shapes and dtypes.

    Raises:
        CheckpointError: naming the tensor whose chunks leave gaps, overlap or lie outside it.
    """

    def __init__(self, where: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype, Sequence[Chunk]]]):
        # Each tensor's chunks sorted by offset, and their largest extent in dim 0, to bound the search in `read_into`.
        self._stored: dict[str, tuple[tuple[Chunk, ...], int]] = {}
        entries: dict[str, TensorMeta] = {}
        for name, (shape, dtype, chunks) in tensors.items():
            extents = [*shape, *(number for chunk in chunks for number in (*chunk.box.offset, *chunk.box.shape))]
            if not all(type(number) is int and number >= 0 for number in extents):
                raise CheckpointError(
                    f"{where}: {name} has invalid sizes or offsets: shape {list(shape)}, then chunks {extents[:8]}."
                )
            check_cover(f"{where}: {name}", shape, [chunk.box for chunk in chunks])
            filled = sorted((chunk for chunk in chunks if chunk.box.numel), key=lambda chunk: chunk.box.offset)
            reach = max((chunk.box.shape[0] for chunk in filled), default=0) if shape else 0
            self._stored[name] = tuple(filled), reach
            entries[name] = TensorMeta(shape, dtype)
        self.entries: Mapping[str, TensorMeta] = entries

    @abstractmethod
    def read_chunk(self, name: str, chunk: Chunk, starts: Sequence[int], target: Tensor) -> None:
        """Fills `target`, of any shape, with the box of a chunk that begins at `starts`."""

    def read(self, name: str, memory: Memory = FRESH) -> Tensor:
        """Reads a full tensor of any shape."""
        shape = self.entries[name].shape
        return self.read_box(name, [0] * len(shape), shape, memory)

    def read_box(self, name: str, offsets: Sequence[int], lengths: Sequence[int], memory: Memory = FRESH) -> Tensor:
        """Reads a box of a tensor, of the shape `lengths`, and little more than its bytes.

        Raises:
            CheckpointError: naming the file, if data is damaged.
        """
        out = memory.empty(lengths, self.entries[name].dtype)
        self.read_into(name, offsets, out)
        return out

    def read_into(self, name: str, offsets: Sequence[int], out: Tensor) -> None:
        """Reads the same into an existing tensor of any shape."""
        chunks, reach = self._stored[name]
        request_box = TensorChunk(tuple(offsets), tuple(out.shape))
        check_boxes(name, self.entries[name].shape, [request_box])
        if request_box.offset:
            start, stop = request_box.offset[0], request_box.offset[0] + request_box.shape[0]
            first = bisect.bisect_left(chunks, start - reach + 1, key=_row)
            chunks = chunks[first : bisect.bisect_left(chunks, stop, key=_row)]
        for chunk in chunks:
            low = [max(pair) for pair in zip(chunk.box.offset, request_box.offset, strict=True)]
            high = [min(pair) for pair in zip(_end(chunk.box), _end(request_box), strict=True)]
            if all(begin < end for begin, end in zip(low, high, strict=True)):
                corners = zip(low, high, request_box.offset, strict=True)
                target = out[tuple(slice(begin - origin, end - origin) for begin, end, origin in corners)]
                starts = [begin - origin for begin, origin in zip(low, chunk.box.offset, strict=True)]
                self.read_chunk(name, chunk, starts, target)


def _row(chunk: Chunk) -> int:
    return chunk.box.offset[0]


def _end(box: TensorChunk) -> list[int]:
    return [start + length for start, length in zip(box.offset, box.shape, strict=True)]


def check_cover(where: str, shape: Sequence[int], boxes: Sequence[TensorChunk]) -> None:
    """Checks that every element of a tensor is in exactly one of its boxes.

    Raises:
        CheckpointError: naming the tensor, for gaps and overlaps.
    """
    check_boxes(where, shape, boxes)
    num_covered, size = sum(box.numel for box in boxes), math.prod(shape)
    if num_covered != size or not _disjoint([box for box in boxes if box.numel]):
        kind = "there are gaps" if num_covered < size else "they overlap"
        raise CheckpointError(
            f"{where}: {len(boxes)} chunks hold {num_covered} elements of a tensor with {size}: {kind}."
        )


def _disjoint(boxes: list[TensorChunk]) -> bool:
    """Returns whether no boxes overlap: splits them along any dim into ever smaller groups, compares what remains."""
    remaining = [boxes]
    while remaining:
        together = remaining.pop()
        if len(together) < 2:
            continue
        groups = next((cut for cut in map(_cut, [together] * len(together[0].shape), range(64)) if cut), None)
        if groups:
            remaining.extend(groups)
        elif len(together) > 1024 or len(overlaps(together, together)) > len(together):
            return False
    return True


def _cut(boxes: list[TensorChunk], dim: int) -> list[list[TensorChunk]]:
    """Groups boxes whose ranges along a dim are disjoint; returns no groups if all ranges are connected."""
    groups: list[list[TensorChunk]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offset[dim]):
        if box.offset[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offset[dim] + box.shape[dim])
    return groups if len(groups) > 1 else []
