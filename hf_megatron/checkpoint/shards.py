"""The files of a sharded checkpoint: safetensors, hashed while they are written, mapped when they are read."""

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from ..errors import CheckpointError
from ..upstream import local_tensor

# dtype -> its name in a safetensors header.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

LARGEST_HEADER = 100_000_000
# What is copied from a device at a time, and what is hashed and written at a time.
CHUNK = 32 << 20
BLOCK = 256 << 10


@dataclass(frozen=True)
class FileEntry:
    """A file's size and the digest of its content; the digest's field in the manifest is the algorithm's name."""

    size: int
    blake3: str


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in a file, in bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def write_shard(path: Path, tensors: Mapping[str, Tensor], on_step: Callable[[str], None]) -> FileEntry:
    """Writes one-dimensional tensors to a new safetensors file, durably, and returns its size and digest.

    Each block is hashed and then written while it is in the processor's cache. A hashing thread beside the writer would
    read everything from memory twice and takes longer. Tensors on a device pass through a few chunks of CPU memory.

    Raises:
        CheckpointError: for a dtype that cannot be stored.
        OSError: from the file system.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # Widest dtype first keeps every tensor aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for key, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{key}: {tensor.dtype} cannot be stored in safetensors.")
        end = position + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > LARGEST_HEADER:
        raise CheckpointError(f"{path}: a header of {len(encoded)} bytes; at most {LARGEST_HEADER} can be read back.")
    digest = blake3()
    with open(path, "xb", buffering=0) as file:
        on_step("open")
        start = struct.pack("<Q", len(encoded)) + encoded
        digest.update(start)
        _write_all(file.fileno(), memoryview(start))
        on_step("header")
        for key, tensor in ordered:
            for block in _blocks(tensor):
                digest.update(block)
                _write_all(file.fileno(), block)
            on_step(f"tensor {key}")
        os.fsync(file.fileno())
        on_step("fsync")
    return FileEntry(len(start) + position, digest.hexdigest())


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in order."""
    for part in tensor.detach().split(CHUNK // tensor.element_size()):
        if part.numel():
            chunk = memoryview(part.cpu().contiguous().view(torch.uint8).numpy())
            for start in range(0, len(chunk), BLOCK):
                yield chunk[start : start + BLOCK]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def hash_tensor(tensor: Tensor) -> str:
    """The digest of what this rank holds of a tensor."""
    digest = blake3()
    for block in _blocks(local_tensor(tensor).detach().reshape(-1)):
        digest.update(block)
    return digest.hexdigest()


def hash_file(path: Path) -> FileEntry:
    """Size and digest of a file as it is now."""
    # More threads would be blake3's own pool, which a forked process waits for forever.
    digest, size = blake3(), 0
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def write_durably(path: Path, text: str) -> None:
    """Writes a small file that survives a power failure; its name does after `sync_directory`."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> dict[str, Span]:
    """Where each tensor of a safetensors file lies; nothing larger than the file allows is read or allocated.

    Raises:
        CheckpointError: naming the file and what is wrong with its header.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{path}: a header of {length} bytes is announced in a file of {size} bytes.")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not a table of tensors.")
    header.pop("__metadata__", None)
    return {key: _span(f"{path}: tensor {key!r}", entry, 8 + length, size) for key, entry in header.items()}


def _span(where: str, entry: Any, origin: int, size: int) -> Span:
    try:
        dtype, shape, (begin, end) = _BY_NAME[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numel = math.prod(shape)
        sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} has the unreadable header entry {str(entry)[:200]}.") from error
    if not sound or end - begin != numel * dtype.itemsize or origin + end > size:
        raise CheckpointError(f"{where}: bytes [{begin}, {end}) for {shape} {dtype} in a file of {size} bytes.")
    return Span(dtype, tuple(shape), origin + begin)


class MappedShard:
    """A safetensors file mapped into memory: only the pages that are copied from are read."""

    def __init__(self, path: Path):
        self.path = path
        self.spans = read_header(path)
        with open(path, "rb") as file:
            # Private and never written to: torch takes no read-only memory without a warning.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def forget(self) -> None:
        """Gives back the memory of pages that were read; they are read again when they are needed."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def tensor(self, key: str) -> Tensor:
        """The flat contents of a tensor, without a copy.

        Raises:
            CheckpointError: when the file has no such tensor.
        """
        span = self.spans.get(key)
        if span is None:
            raise CheckpointError(f"{self.path}: there is no tensor {key!r} in this file.")
        if span.numel == 0:
            return torch.empty(0, dtype=span.dtype)
        return torch.frombuffer(self._memory, dtype=span.dtype, count=span.numel, offset=span.start)
