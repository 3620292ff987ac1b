"""Reusable memory for tensors that exist only until they are written.

Reading from the page cache into reused memory takes a fifth of the time of fresh memory, whose pages must be mapped
and zeroed. A conversion therefore recycles its buffers.
"""

import contextlib
import mmap
import sys
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Lock

import numpy
import torch
from torch import Tensor

from ...errors import CheckpointError

# Smaller tensors use torch's own allocator, which already reuses memory.
_SMALLEST = 1 << 20


class Memory:
    """Tensor allocator; this base class allocates new memory for each tensor."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized CPU tensor."""
        return torch.empty(tuple(shape), dtype=dtype)

    def like(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns an uninitialized tensor of another shape, on the meta device if `tensor` is."""
        if tensor.device.type == "meta":
            return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
        return self.empty(shape, tensor.dtype)

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenates tensors along a dim into newly allocated memory."""
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"Tensors with different dtypes ({', '.join(sorted(map(str, dtypes)))}) cannot be concatenated."
            )
        shape = list(parts[0].shape)
        dim %= len(shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        out, start = self.like(parts[0], shape), 0
        for part in parts:
            out.narrow(dim, start, part.shape[dim]).copy_(part)
            start += part.shape[dim]
        return out

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous tensor as it is, and a contiguous copy of any other; any shape."""
        if tensor.is_contiguous():
            return tensor
        return self.like(tensor, tensor.shape).copy_(tensor)


FRESH = Memory()


class Pool(Memory):
    """Memory pool that reuses the buffers of freed tensors.

    Args:
        limit: maximum number of free bytes to keep.
    """

    def __init__(self, limit: int):
        self._free: list[mmap.mmap] = []
        self._limit = limit
        self._lock = Lock()
        # A tensor may be freed at any time, in any thread, and inside `_take`: the finalizer only puts its buffer into
        # this queue.
        self._returned: SimpleQueue[mmap.mmap] = SimpleQueue()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size < _SMALLEST:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(size)
        # The tensor's storage references the array; when the last view is freed, the buffer returns to the queue.
        array = numpy.frombuffer(block, dtype=numpy.uint8, count=size)
        weakref.finalize(array, self._returned.put, block).atexit = False
        return torch.frombuffer(array, dtype=dtype).view(tuple(shape))

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            while not self._returned.empty():
                self._free.append(self._returned.get())
            fitting = [block for block in self._free if size <= len(block) <= 2 * size]
            if fitting:
                block = min(fitting, key=len)
                self._free.remove(block)
                return block
            while sum(map(len, self._free)) > self._limit:
                # Drop the largest buffer first: an embedding's is needed once, a layer's repeatedly.
                self._free.remove(max(self._free, key=len))
        if sys.platform != "linux":
            return mmap.mmap(-1, size)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without huge pages returns EINVAL; small pages work as well.
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block
