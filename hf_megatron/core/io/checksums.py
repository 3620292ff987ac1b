"""Files with the digest of what they should hold: blake3, computed while they are written."""

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

# What is copied from a device at a time, and what is hashed and written at a time, in bytes.
CHUNK = 32 << 20
BLOCK = 256 << 10


@dataclass(frozen=True)
class FileDigest:
    """A file's size in bytes and the digest of its content; the field's name in a manifest is the algorithm's."""

    size: int
    blake3: str


class NewFile:
    """A new file of bytes and tensors, in the order in which they come or at places that are told.

    Each block is hashed and then written while it is in the processor's cache. A hashing thread beside the writer would
    read everything from memory twice and takes longer.

    It has the methods of a binary file that `torch.save` and `zipfile` need of one that cannot seek.

    Args:
        path (`Path`): must not exist.
        hashed (`bool`, defaults to `True`): keep the digest of what is handed in; it has to come in order then.
    """

    def __init__(self, path: Path, hashed: bool = True):
        self.path = path
        self.size = 0
        self._digest = blake3() if hashed else None
        self._file: IO[bytes] = open(path, "xb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes and returns how many."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            if self._digest is not None:
                self._digest.update(block)
            self._put(block)
        return len(view)

    def write_tensor(self, tensor: Tensor, at: int | None = None) -> int:
        """Writes the bytes of a tensor of any shape in row-major order; one on a device passes through chunks.

        Args:
            tensor: what to write.
            at (`int`, *optional*): where in the file; at its end by default.

        Raises:
            CheckpointError: a file with a digest has not grown up to that place.
        """
        if at is not None and at != self.size:
            if self._digest is not None:
                raise CheckpointError(f"{self.path}: bytes for place {at} came when {self.size} was due.")
            self.size = at
        return sum(self.write(block) for block in _bytes_of(tensor))

    def _put(self, block: memoryview) -> None:
        while block:
            count = os.pwrite(self._file.fileno(), block, self.size)
            block, self.size = block[count:], self.size + count

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def seekable(self) -> bool:
        return False

    @property
    def digest(self) -> FileDigest:
        """What the file contains, if all went well."""
        assert self._digest is not None
        return FileDigest(self.size, self._digest.hexdigest())

    def discard(self) -> None:
        """Closes the file, which is going to be deleted."""
        with contextlib.suppress(OSError):
            self._file.close()

    def close(self, durable: bool = True) -> None:
        """Closes the file, and makes it durable unless that is left out."""
        if not self._file.closed:
            if durable:
                os.fsync(self._file.fileno())
            self._file.close()


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    for part in flat.split(CHUNK // flat.element_size()):
        if part.numel():
            yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


def hash_tensor(tensor: Tensor) -> str:
    """Hashes what this rank holds of a tensor of any shape."""
    digest = blake3()
    for chunk in _bytes_of(local_tensor(tensor)):
        digest.update(chunk)
    return digest.hexdigest()


def hash_file(path: Path, on_block: Callable[[int], object] = lambda size: None) -> FileDigest:
    """Size and digest of a file as it is now; `on_block` is called with the bytes of each part."""
    # More threads would be blake3's own pool, which a forked process waits for forever.
    digest, size = blake3(), 0
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
            on_block(count)
    return FileDigest(size, digest.hexdigest())
