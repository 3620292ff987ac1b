"""Memory for tensors that live as long as it takes to write them.

Reading from the page cache into memory that was used before takes a fifth of the time of fresh memory, whose pages have
to be mapped and zeroed. So a conversion hands its memory round.
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

# Below, torch's own allocation reuses memory.
_SMALLEST = 1 << 20


class Memory:
    """Where tensors are put; this one takes fresh memory for each."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised tensor on the CPU."""
        return torch.empty(tuple(shape), dtype=dtype)

    def like(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns an uninitialised tensor of another shape; on the meta device where `tensor` is."""
        if tensor.device.type == "meta":
            return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
        return self.empty(shape, tensor.dtype)

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Tensors one after another along a dim, copied."""
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise CheckpointError(f"tensors of {', '.join(sorted(map(str, dtypes)))} do not become one.")
        shape = list(parts[0].shape)
        dim %= len(shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        out, start = self.like(parts[0], shape), 0
        for part in parts:
            out.narrow(dim, start, part.shape[dim]).copy_(part)
            start += part.shape[dim]
        return out

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, of any shape, if its entries lie in order, else a copy in which they do."""
        if tensor.is_contiguous():
            return tensor
        return self.like(tensor, tensor.shape).copy_(tensor)


FRESH = Memory()


class Pool(Memory):
    """Takes memory that tensors before have let go of.

    Args:
        limit: bytes that may lie free.
    """

    def __init__(self, limit: int):
        self._free: list[mmap.mmap] = []
        self._limit = limit
        self._lock = Lock()
        # A tensor may go at any moment, in any thread, and in the midst of `_take`: putting into this queue is all that
        # is done then.
        self._returned: SimpleQueue[mmap.mmap] = SimpleQueue()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size < _SMALLEST:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(size)
        # The tensor's storage holds the array; with the last view of it the block comes back.
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
                # The embedding's comes once, those of layers again and again.
                self._free.remove(max(self._free, key=len))
        if sys.platform != "linux":
            return mmap.mmap(-1, size)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel built without huge pages answers EINVAL; the memory is as good in small ones.
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block
