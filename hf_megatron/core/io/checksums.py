"""Files with blake3 digests of their intended content, computed while they are written."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from blake3 import blake3
from torch import Tensor

from ...compat.torch_dtensor import local_tensor
from ...errors import CheckpointError

# Bytes copied from a device at a time, and bytes hashed and written at a time.
CHUNK = 32 << 20
BLOCK = 256 << 10


@dataclass(frozen=True)
class FileDigest:
    """Size of a file in bytes and digest of its content; in a manifest, the field's name is the hash algorithm."""

    size: int
    blake3: str


class NewFile:
    """New file of bytes and tensors, written sequentially or at given offsets.

    Each block is hashed and then written while it is in the CPU cache. A separate hashing thread would read all data
    from memory twice, and is slower.

    It implements the binary file methods that `torch.save` and `zipfile` need for a non-seekable file.

    Args:
        path (`Path`): must not exist.
        hashed (`bool`, defaults to `True`): whether to compute the digest; data must be written sequentially then.
    """

    def __init__(self, path: Path, hashed: bool = True):
        self.path = path
        self.size = 0
        self._digest = blake3() if hashed else None
        self._file: IO[bytes] = open(path, "xb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes; returns their number."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            if self._digest is not None:
                self._digest.update(block)
            self._put(block)
        return len(view)

    def write_tensor(self, tensor: Tensor, at: int | None = None) -> int:
        """Writes the bytes of a tensor of any shape in row-major order; device tensors are copied in chunks.

        Args:
            tensor: the tensor to write.
            at (`int`, *optional*): offset in the file; by default its end.

        Raises:
            CheckpointError: the file has a digest, and `at` is not its end.
        """
        if at is not None and at != self.size:
            if self._digest is not None:
                raise CheckpointError(f"{self.path}: got bytes for offset {at}, expected offset {self.size}.")
            self.size = at
        return sum(self.write(block) for block in _iter_bytes(tensor))

    def _put(self, block: memoryview) -> None:
        while block:
            count = os.pwrite(self._file.fileno(), block, self.size)
            block, self.size = block[count:], self.size + count

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Does nothing: writes are unbuffered."""

    def seekable(self) -> bool:
        return False

    @property
    def digest(self) -> FileDigest:
        """Size and digest of the bytes written so far."""
        assert self._digest is not None
        return FileDigest(self.size, self._digest.hexdigest())

    def discard(self) -> None:
        """Closes the file without making it durable; the caller deletes it."""
        with contextlib.suppress(OSError):
            self._file.close()

    def close(self, durable: bool = True) -> None:
        """Closes the file, by default after an fsync."""
        if not self._file.closed:
            if durable:
                os.fsync(self._file.fileno())
            self._file.close()


def _iter_bytes(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    for part in flat.split(CHUNK // flat.element_size()):
        if part.numel():
            yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


def hash_tensor(tensor: Tensor) -> str:
    """Hashes this rank's local shard of a tensor of any shape."""
    digest = blake3()
    for chunk in _iter_bytes(local_tensor(tensor)):
        digest.update(chunk)
    return digest.hexdigest()


def hash_file(path: Path, on_block: Callable[[int], object] = lambda size: None) -> FileDigest:
    """Returns the size and digest of a file's current content; calls `on_block` with the size of each block read."""
    # Single-threaded: blake3's thread pool would deadlock in a forked process.
    digest, size = blake3(), 0
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
            on_block(count)
    return FileDigest(size, digest.hexdigest())
