"""Safetensors files: tensors read one at a time into memory of their own, and written in a planned order."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.shards import DTYPES, LARGEST_HEADER, Span, read_header
from ..errors import CheckpointError
from .memory import FRESH, Memory
from .output import HashedFile
from .tensors import Entry


class SafetensorsFile:
    """A safetensors file; nothing stays mapped, so memory is what the caller keeps.

    Raises:
        CheckpointError: the file is missing, truncated or has another header than the format asks for.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.spans: Mapping[str, Span] = read_header(path)
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def read(self, name: str, memory: Memory = FRESH) -> Tensor:
        """A whole tensor."""
        span = self.spans[name]
        out = memory.empty(span.shape, span.dtype)
        if out.numel():
            read_at(self._descriptor, out.view(-1).view(torch.uint8).numpy().data, span.start, self.path)
        return out

    def close(self) -> None:
        os.close(self._descriptor)


def read_at(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills the buffer from a place in a file.

    Raises:
        CheckpointError: the file ends before.
    """
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if not count:
            raise CheckpointError(f"{path} ends at byte {offset}, {len(buffer)} before the end of a tensor.")
        buffer, offset = buffer[count:], offset + count


class SafetensorsStream:
    """Writes one safetensors file whose tensors come in the order of its header."""

    def __init__(self, file: HashedFile, entries: Mapping[str, Entry]):
        self._file = file
        self._remaining = dict(entries)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, entry in entries.items():
            if entry.dtype not in DTYPES:
                raise CheckpointError(f"{name}: {entry.dtype} cannot be stored in safetensors.")
            header[name] = {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [position, position + entry.nbytes],
            }
            position += entry.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        if len(encoded) > LARGEST_HEADER:
            raise CheckpointError(f"{file.path}: a header of {len(encoded)} bytes; {LARGEST_HEADER} can be read back.")
        file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: Tensor) -> None:
        expected = next(iter(self._remaining), None)
        if name != expected or self._remaining.pop(name) != Entry.of(tensor):
            raise CheckpointError(f"{self._file.path}: {name} {tuple(tensor.shape)} came where {expected} was due.")
        self._file.write_tensor(tensor)

    def finish(self) -> None:
        """Raises for tensors that never came."""
        if self._remaining:
            raise CheckpointError(f"{self._file.path}: {list(self._remaining)[:5]} were planned and never came.")
