"""Random access to files: plain bytes, and rectangular chunks of tensors."""

import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from .checksums import CHUNK

# Start of the pointer file that git-lfs leaves for a file it did not fetch.
_POINTER = b"version https://git-lfs"
_LARGEST_POINTER = 1024


class DataFile:
    """Regular file opened for reading at any offset."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # Non-blocking: opening a named pipe would otherwise wait for its writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            file_stat = os.fstat(self._descriptor)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not stat.S_ISREG(file_stat.st_mode):
            os.close(self._descriptor)
            raise CheckpointError(f"{path} is not a regular file.")
        self.size = file_stat.st_size
        if self.size < _LARGEST_POINTER and os.pread(self._descriptor, len(_POINTER), 0) == _POINTER:
            os.close(self._descriptor)
            raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself. Run `git lfs pull`.")

    def read(self, offset: int, length: int) -> bytes:
        """Reads bytes of the file; `CheckpointError` if it is too short."""
        self.check(offset, length)
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills a buffer; `CheckpointError` if the file is too short."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if not count:
                raise CheckpointError(f"{self.path} is truncated: it ends at byte {offset}, {len(buffer)} bytes short.")
            buffer, offset = buffer[count:], offset + count

    def check(self, offset: int, length: int) -> None:
        """Raises `CheckpointError` unless the byte range lies inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(
                f"{self.path}: bytes [{offset}, {offset + length}) are out of range for a file of {self.size} bytes."
            )

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Window(io.RawIOBase):
    """Byte range of a file as a separate file object."""

    def __init__(self, file: DataFile, offset: int, length: int):
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + position < 0:
            raise ValueError(f"negative file position {origin + position}")
        self._position = origin + position
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._length - self._position, 0)
        data = self._file.read(self._offset + self._position, rest if size < 0 else min(size, rest))
        self._position += len(data)
        return data


def read_strided(file: DataFile, begin: int, first: int, stride: tuple[int, ...], out: Tensor) -> None:
    """Copies a rectangular chunk of a tensor from a file.

    Ranges that are contiguous in the file and in `out` are read directly; others pass through temporary buffers of
    bounded size.

    Args:
        begin: byte offset of the tensor in the file.
        first: index of the chunk's first entry in the flattened tensor.
        stride: strides of the tensor, in entries.
        out: output tensor with the shape of the chunk.
    """
    while out.dim() and out.shape[0] == 1:
        out, stride = out[0], stride[1:]
    place = begin + first * out.element_size()
    span = 1 + sum((length - 1) * step for length, step in zip(out.shape, stride, strict=True))
    if not out.numel():
        return
    if stride == row_major(out.shape) and out.is_contiguous():
        file.read_into(view_as_bytes(out), place)
    elif span * out.element_size() <= CHUNK or not out.dim():
        part = torch.empty(span, dtype=out.dtype)
        file.read_into(view_as_bytes(part), place)
        out.copy_(part.as_strided(out.shape, stride))
    else:
        # Split along the dim with the largest extent into at least two steps, so that each span is smaller.
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


def view_as_bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor of any shape."""
    return tensor.view(-1).view(torch.uint8).numpy().data
