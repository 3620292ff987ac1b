"""Files that are read at any place: plain bytes, and boxes of tensors in them."""

import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from .checksums import CHUNK

# What git-lfs puts in the place of a file that it did not fetch.
_POINTER = b"version https://git-lfs"
_LARGEST_POINTER = 1024


class DataFile:
    """A regular file opened for reading at any place."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # Without waiting for whoever may write to a named pipe.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise CheckpointError(f"{path} is not a regular file.")
        self.size = found.st_size
        if self.size < _LARGEST_POINTER and os.pread(self._descriptor, len(_POINTER), 0) == _POINTER:
            os.close(self._descriptor)
            raise CheckpointError(f"{path} is a pointer of git-lfs, not the file itself: git lfs pull fetches it.")

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file; `CheckpointError` where it ends before."""
        self.check(offset, length)
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills a buffer; `CheckpointError` where the file ends before."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if not count:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset}, {len(buffer)} before the end of what should be there."
                )
            buffer, offset = buffer[count:], offset + count

    def check(self, offset: int, length: int) -> None:
        """Raises `CheckpointError` unless a range, in bytes, lies inside of the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(f"{self.path}: bytes [{offset}, {offset + length}) of a file of {self.size} bytes.")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: DataFile, offset: int, length: int):
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + position < 0:
            raise ValueError(f"a place {origin + position} before the start")
        self._position = origin + position
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._length - self._position, 0)
        data = self._file.read(self._offset + self._position, rest if size < 0 else min(size, rest))
        self._position += len(data)
        return data


def read_strided(file: DataFile, begin: int, first: int, stride: tuple[int, ...], out: Tensor) -> None:
    """Copies a box of a tensor in a file.

    What is contiguous in both goes straight to its place; the rest passes through a few chunks of memory.

    Args:
        begin: where the tensor's bytes begin in the file.
        first: the number of the box's first entry.
        stride: of the tensor, in entries.
        out: where to; it has the shape of the box.
    """
    while out.dim() and out.shape[0] == 1:
        out, stride = out[0], stride[1:]
    place = begin + first * out.element_size()
    span = 1 + sum((length - 1) * step for length, step in zip(out.shape, stride, strict=True))
    if not out.numel():
        return
    if stride == row_major(out.shape) and out.is_contiguous():
        file.read_into(bytes_of(out), place)
    elif span * out.element_size() <= CHUNK or not out.dim():
        part = torch.empty(span, dtype=out.dtype)
        file.read_into(bytes_of(part), place)
        out.copy_(part.as_strided(out.shape, stride))
    else:
        # The dim that reaches furthest; at least two steps, so that each is smaller.
        dim = max(range(out.dim()), key=lambda dim: (out.shape[dim] - 1) * stride[dim])
        rows = min(CHUNK // max(stride[dim] * out.element_size(), 1), out.shape[dim] // 2)
        rows, length = max(rows, 1), out.shape[dim]
        for row in range(0, length, rows):
            part = out.narrow(dim, row, min(rows, length - row))
            read_strided(file, begin, first + row * stride[dim], stride, part)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in entries, of a contiguous tensor of this shape."""
    steps, step = [], 1
    for length in reversed(shape):
        steps.append(step)
        step *= length
    return tuple(reversed(steps))


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor of any shape on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
