"""Rectangular chunks of global tensors: a rank's local shard as chunks, and the overlap of two layouts.

A `LocalChunk` is a flat run of entries plus the chunks (`boxes`) of the global tensor that they fill in sequence.
Every split of a tensor (over tp, or as a range of an optimizer's flattened shard) is expressed in chunks, so two
layouts can be matched without knowledge of each other.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from ..core.axes import Axes
from ..core.placement import Placement
from ..errors import CheckpointError

# Number of source chunks that are compared with all targets at once.
_BATCH = 256


@dataclass(frozen=True)
class TensorChunk:
    """Rectangular chunk of a global tensor: offset and shape, one entry per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class LocalChunk:
    """Entries of a global tensor that one rank holds.

    Args:
        name (`str`): name of the tensor.
        shape (`tuple[int, ...]`): the global shape.
        boxes (`tuple[TensorChunk, ...]`): the chunks that the entries fill; a scalar has the single chunk `((), ())`.
        data (`Tensor`): `(entries,)`, the concatenated row-major contents of the chunks.

    Raises:
        CheckpointError: chunks are outside the tensor, or have another number of entries than the data.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[TensorChunk, ...]
    data: Tensor

    def __post_init__(self) -> None:
        if self.data.dim() != 1:
            raise CheckpointError(
                f"{self.name}: the data of a chunk must have one dim, got shape {tuple(self.data.shape)}."
            )
        check_boxes(self.name, self.shape, self.boxes)
        _check_length(self.name, self.boxes, self.data)


def check_boxes(name: str, shape: Sequence[int], boxes: Sequence[TensorChunk]) -> None:
    """Raises `CheckpointError` unless every chunk lies inside a tensor of this shape."""
    for box in boxes:
        inside = len(box.offset) == len(box.shape) == len(shape) and all(
            min(start, length) >= 0 and start + length <= size
            for start, length, size in zip(box.offset, box.shape, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{name}: the chunk at offset {list(box.offset)} with shape {list(box.shape)} exceeds the tensor shape "
                f"{list(shape)}."
            )


def _check_length(name: str, boxes: Sequence[TensorChunk], data: Tensor) -> None:
    expected = sum(box.numel for box in boxes)
    if data.numel() != expected:
        raise CheckpointError(f"{name}: the chunks have {expected} entries, but the data has {data.numel()}.")


def local_boxes(
    shape: Sequence[int], placement: Placement, axes: Axes, start: int = 0, stop: int | None = None
) -> tuple[TensorChunk, ...]:
    """Returns the chunks that the entries `[start, stop)` of a rank's flattened shard fill in the global tensor.

    The chunks are in the order of the entries. The shard is the concatenation of the placement's intervals along each
    split dim; a range outside of it raises `CheckpointError`.
    """
    held = [_merged(intervals) for intervals in placement.intervals(shape, axes)]
    local = tuple(sum(last - first for first, last in intervals) for intervals in held)
    size = math.prod(local)
    stop = size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise CheckpointError(f"Entries [{start}, {stop}) of a shard of shape {list(local)}, which has {size} entries.")
    boxes = list(_flat_range(local, start, stop))
    # Innermost dims first: a chunk that is split along a dim has a single entry in the dims before it, or lies in one
    # interval.
    for dim in sorted({split.dim for split in placement.splits}, reverse=True):
        boxes = [part for box in boxes for part in _to_global(box, dim, held[dim])]
    return tuple(boxes)


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges adjacent intervals and drops empty ones."""
    merged: list[tuple[int, int]] = []
    for first, last in intervals:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        elif first < last:
            merged.append((first, last))
    return merged


def _flat_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorChunk]:
    """Decomposes a range of flattened entries into chunks, recursively: a row's end, full rows, a row's start."""
    if start >= stop:
        return
    if not shape:
        yield TensorChunk((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _inside_row(shape, last, start, stop)
        return
    yield from _inside_row(shape, first - 1, start, first * row)
    if first < last:
        yield TensorChunk((first,) + (0,) * (len(shape) - 1), (last - first,) + shape[1:])
    yield from _inside_row(shape, last, last * row, stop)


def _inside_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[TensorChunk]:
    origin = index * math.prod(shape[1:])
    for box in _flat_range(shape[1:], start - origin, stop - origin):
        yield TensorChunk((index, *box.offset), (1, *box.shape))


def _to_global(box: TensorChunk, dim: int, intervals: Sequence[tuple[int, int]]) -> Iterator[TensorChunk]:
    """Splits a chunk of the shard at the borders of its intervals, and moves it to its offset in the full tensor."""
    parts, position = [], 0
    begin, end = box.offset[dim], box.offset[dim] + box.shape[dim]
    for first, last in intervals:
        low, high = max(begin, position), min(end, position + last - first)
        if low < high:
            parts.append((first + low - position, high - low))
        position += last - first
    if len(parts) == 1:
        (moved, _), *_ = parts
        yield TensorChunk((*box.offset[:dim], moved, *box.offset[dim + 1 :]), box.shape)
        return
    # Several intervals alternate in memory for each index of the dims before the split one.
    leading = [range(at, at + length) for at, length in zip(box.offset[:dim], box.shape[:dim], strict=True)]
    for index in itertools.product(*leading):
        for moved, length in parts:
            yield TensorChunk((*index, moved, *box.offset[dim + 1 :]), (1,) * dim + (length,) + box.shape[dim + 1 :])


def _corners(boxes: Sequence[TensorChunk]) -> tuple[numpy.ndarray, numpy.ndarray]:
    low = numpy.array([box.offset for box in boxes], dtype=numpy.int64)
    return low, low + numpy.array([box.shape for box in boxes], dtype=numpy.int64)


def overlaps(source: Sequence[TensorChunk], target: Sequence[TensorChunk]) -> list[tuple[int, int]]:
    """Returns the pairs `(index in source, index in target)` of chunks that overlap."""
    if not source or not target:
        return []
    source_low, source_high = _corners(source)
    target_low, target_high = _corners(target)
    pairs: list[tuple[int, int]] = []
    for begin in range(0, len(source), _BATCH):
        low, high = source_low[begin : begin + _BATCH], source_high[begin : begin + _BATCH]
        # Chunks are ordered by their entries, so only a few targets are near a batch of sources.
        near = numpy.nonzero(((target_low < high.max(0)) & (low.min(0) < target_high)).all(1))[0]
        common = numpy.ones((len(low), len(near)), dtype=bool)
        for dim in range(low.shape[1]):
            first = numpy.maximum(low[:, dim, None], target_low[None, near, dim])
            common &= first < numpy.minimum(high[:, dim, None], target_high[None, near, dim])
        rows, columns = numpy.nonzero(common)
        pairs.extend(zip((rows + begin).tolist(), near[columns].tolist(), strict=True))
    return pairs


def _common(box: TensorChunk, other: TensorChunk) -> tuple[slice, ...]:
    """Returns the slices of `box` that overlap with `other`."""
    return tuple(
        slice(max(start, other_start) - start, min(start + length, other_start + other_length) - start)
        for start, length, other_start, other_length in zip(
            box.offset, box.shape, other.offset, other.shape, strict=True
        )
    )


def _views(boxes: Sequence[TensorChunk], data: Tensor) -> list[Tensor]:
    ends = list(itertools.accumulate(box.numel for box in boxes))
    return [data[end - box.numel : end].view(box.shape) for box, end in zip(boxes, ends, strict=True)]


def copy_overlap(
    source_boxes: Sequence[TensorChunk], source_data: Tensor, target_boxes: Sequence[TensorChunk], target_data: Tensor
) -> int:
    """Copies all common entries and returns their number; both data are `(entries of the boxes,)`."""
    _check_length("source", source_boxes, source_data)
    _check_length("target", target_boxes, target_data)
    pairs = overlaps(source_boxes, target_boxes)
    if not pairs:
        return 0
    sources, targets = _views(source_boxes, source_data), _views(target_boxes, target_data)
    copied = 0
    for source, target in pairs:
        view = targets[target][_common(target_boxes[target], source_boxes[source])]
        view.copy_(sources[source][_common(source_boxes[source], target_boxes[target])])
        copied += view.numel()
    return copied


def uncovered(sources: Sequence[Sequence[TensorChunk]], target_boxes: Sequence[TensorChunk]) -> int:
    """Returns the number of target entries that no source holds; sources may overlap."""
    size = sum(box.numel for box in target_boxes)
    boxes = [box for source in sources for box in source]
    pairs = overlaps(boxes, target_boxes)
    used = [boxes[index] for index in dict.fromkeys(index for index, _ in pairs)]
    if len(overlaps(used, used)) == len(used):
        shared = (_common(boxes[source], target_boxes[target]) for source, target in pairs)
        return size - sum(math.prod(part.stop - part.start for part in slices) for slices in shared)
    # Entries in several chunks must not be counted twice.
    covered = torch.zeros(size, dtype=torch.bool)
    targets = _views(target_boxes, covered)
    for source, target in pairs:
        targets[target][_common(target_boxes[target], boxes[source])] = True
    return size - int(torch.count_nonzero(covered))
