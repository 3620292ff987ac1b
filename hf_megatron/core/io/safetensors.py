"""Safetensors files: header parser, streaming writer, and readers that map a file or read single tensors.

The `safetensors` package writes a file from a dictionary that holds all of its tensors, and allocates before checking
sizes against the file. The format is an 8-byte length, a JSON table, and the tensors' bytes.
"""

import json
import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..text import safe_repr
from .buffer_pool import FRESH, Memory
from .checksums import NewFile
from .random_access_file import DataFile, view_as_bytes

# dtype -> its name in a header.
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
# Maximum per file. The largest public models have some 140,000 in all of their files (Kimi K2, with separate experts).
MOST_TENSORS = 200_000


def check_count(where: object, count: int) -> None:
    """Checks that a file does not declare more tensors than any model has.

    Raises:
        CheckpointError: it declares more than `MOST_TENSORS`.
    """
    if count > MOST_TENSORS:
        raise CheckpointError(f"{where}: {count} tensors in one file exceed the limit of {MOST_TENSORS}.")


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def meta(self) -> Tensor:
        """Returns a tensor of this shape and dtype on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        return TensorMeta(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Location(TensorMeta):
    """Location of a tensor in a file; `start` is in bytes from the start of the file."""

    start: int = 0


def widest_first(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """Orders tensors by decreasing dtype size, so that each is aligned in a file."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


class SafetensorsWriter:
    """Writes one file whose tensors are known in advance; the header is written first.

    Args:
        file (`NewFile`): an empty file. With a digest, tensors must be written in the order of the header, otherwise
            in any order.
        tensors (`Mapping[str, TensorMeta]`): the tensors, in file order.

    Raises:
        CheckpointError: a dtype cannot be stored, or the header would be too large to be read back.
    """

    def __init__(self, file: NewFile, tensors: Mapping[str, TensorMeta]):
        self._file = file
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{name}: {tensor.dtype} cannot be stored in safetensors.")
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        if len(encoded) > LARGEST_HEADER:
            raise CheckpointError(f"{file.path}: the header has {len(encoded)} bytes; the limit is {LARGEST_HEADER}.")
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        self._missing = {
            name: Location(tensor.shape, tensor.dtype, file.size + header[name]["data_offsets"][0])
            for name, tensor in tensors.items()
        }

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor at its offset.

        Raises:
            CheckpointError: the tensor is not in the header, was written before, or has another shape or dtype.
        """
        location = self._missing.pop(name, None)
        if location is None or (location.shape, location.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{self._file.path}: got {name} {tuple(tensor.shape)} {tensor.dtype}, expected {location}."
            )
        self._file.write_tensor(tensor, location.start)

    def finish(self) -> None:
        """Checks that all tensors were written.

        Raises:
            CheckpointError: tensors of the header are missing.
        """
        if self._missing:
            raise CheckpointError(f"{self._file.path}: tensors {list(self._missing)[:5]} were never written.")


def read_header(path: Path) -> dict[str, Location]:
    """Reads the location of each tensor of a file; nothing larger than the file is read or allocated.

    Raises:
        CheckpointError: the header is invalid.
    """
    return _read_header(path)[0]


def read_metadata(path: Path) -> Mapping[str, Any]:
    """Reads the metadata of a file's header.

    Raises:
        CheckpointError: as `read_header`.
    """
    return _read_header(path)[1]


def _read_header(path: Path) -> tuple[dict[str, Location], Mapping[str, Any]]:
    with DataFile(path) as file:
        prefix = file.read(0, min(8, file.size))
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(LARGEST_HEADER, file.size - 8):
            raise CheckpointError(f"{path}: invalid header length of {length} bytes in a file of {file.size} bytes.")
        text = file.read(8, length)
        # Check before parsing, which takes seconds for a million tensors.
        check_count(path, text.count(b'"data_offsets"'))
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not a table of tensors.")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: the header's metadata is a {type(metadata).__name__}, not a table.")
    check_count(path, len(header))
    locations = {
        key: _location(f"{path}: tensor {key!r}", entry, 8 + length, file.size) for key, entry in header.items()
    }
    _check_filled(path, locations.values(), 8 + length, file.size)
    return locations, metadata


def _check_filled(path: Path, locations: Collection[Location], origin: int, size: int) -> None:
    """Checks that the tensors cover the file without gaps or overlaps, as the format requires.

    A header of a modified length would shift all of them.
    """
    end = origin
    for location in sorted(locations, key=lambda location: (location.start, location.nbytes)):
        if location.start != end:
            break
        end += location.nbytes
    if end != size:
        raise CheckpointError(
            f"{path}: the tensor data does not cover the file exactly: mismatch at byte {end} of {size}."
        )


def _location(where: str, entry: Any, origin: int, size: int) -> Location:
    try:
        dtype, shape, (begin, end) = _BY_NAME[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numel = math.prod(shape)
        is_valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} has an invalid header entry: {safe_repr(entry)}.") from error
    if not is_valid or end - begin != numel * dtype.itemsize or origin + end > size:
        raise CheckpointError(
            f"{where}: bytes [{safe_repr(begin)}, {safe_repr(end)}) do not match {safe_repr(shape)} {dtype} in a file "
            f"of {size} bytes."
        )
    return Location(tuple(shape), dtype, origin + begin)


class SafetensorsFile:
    """File whose tensors are read one at a time; nothing stays mapped, so only the caller's tensors use memory.

    Raises:
        CheckpointError: the file is missing, truncated or has an invalid header.
    """

    def __init__(self, path: Path):
        self.path = path
        self.locations: Mapping[str, Location] = read_header(path)
        self._file = DataFile(path)

    def read(self, name: str, memory: Memory = FRESH) -> Tensor:
        """Reads a tensor in the shape given by the header."""
        location = self.locations[name]
        out = memory.empty(location.shape, location.dtype)
        if out.numel():
            self._file.read_into(view_as_bytes(out), location.start)
        return out

    def close(self) -> None:
        self._file.close()


class MappedSafetensors:
    """File mapped into memory: only the pages that are accessed are read."""

    def __init__(self, path: Path):
        self.path = path
        self.locations = read_header(path)
        with open(path, "rb") as file:
            # Mapped privately and never written to: torch warns about read-only memory.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def forget(self) -> None:
        """Frees the memory of pages that were read; they are read again when needed."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def tensor(self, key: str) -> Tensor:
        """Returns the contents of a tensor, `[numel]`, without a copy.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        location = self.locations.get(key)
        if location is None:
            raise CheckpointError(f"{self.path} has no tensor {key!r}.")
        if location.numel == 0:
            return torch.empty(0, dtype=location.dtype)
        return torch.frombuffer(self._memory, dtype=location.dtype, count=location.numel, offset=location.start)
