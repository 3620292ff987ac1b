"""Writer of `torch.save` files in one pass, without holding a tensor in memory; `blob` reads them."""

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.torch_memory import rebuild_tensor
from ...core.io.checksums import NewFile
from ...core.io.safetensors import TensorMeta
from ...errors import CheckpointError
from .torch_save import STORAGES

# Storage class names in torch's pickles, by dtype.
_STORAGE_OF: Mapping[torch.dtype, type] = {
    dtype: getattr(torch, name) for name, dtype in STORAGES.items() if not dtype.is_complex
}
ALIGNMENT = 64
# From this value on, zip files store sizes and offsets in 64 bits.
_LARGE = 0xFFFFFFFF


class StorageSlot:
    """Placeholder in a pickle for a tensor whose bytes are written later, as record `data/{number}`."""

    def __init__(self, number: int, entry: TensorMeta):
        if entry.dtype not in _STORAGE_OF:
            raise CheckpointError(f"{entry.dtype} cannot be stored in a Megatron checkpoint.")
        self.number, self.entry = number, entry


class _Storage:
    def __init__(self, slot: StorageSlot):
        self.slot = slot


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        entry = value.slot.entry
        return "storage", _STORAGE_OF[entry.dtype], str(value.slot.number), "cpu", entry.numel

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, StorageSlot):
            return NotImplemented
        shape = value.entry.shape
        return rebuild_tensor(), (_Storage(value), 0, shape, value.entry.meta().stride(), False, OrderedDict())


class ArchiveWriter:
    """A file like the one of `torch.save(content)`; each tensor's bytes are appended as they arrive.

    Args:
        file: output file; the archive begins at its current position.
        content: the object to save, with a `StorageSlot` for each tensor.
    """

    def __init__(self, file: NewFile, content: Any):
        self._file, self._start = file, file.tell()
        self._directory = bytearray()
        self._records = 0
        pickled = io.BytesIO()
        # torch.save uses pickle protocol 2.
        _Pickler(pickled, protocol=2).dump(content)
        for name, data in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            self._header(name, zlib.crc32(data), len(data))
            file.write(data)

    def append(self, number: int, pieces: Sequence[Tensor]) -> None:
        """Writes the bytes of a slot's tensor: contiguous tensors, `[rows, ...]`, that are concatenated.

        The record has no checksum, as with `torch.serialization.set_crc32_options(False)`: torch does not check it,
        and computing it would add half of the time for hashing and writing.
        """
        self._header(f"data/{number}", 0, sum(piece.nbytes for piece in pieces))
        for piece in pieces:
            self._file.write_tensor(piece)

    def _header(self, record: str, crc: int, size: int) -> None:
        """Writes a record's local header, padded so that its data begins at a multiple of 64 bytes."""
        name = f"archive/{record}".encode()
        offset = self._file.tell() - self._start
        large = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
        start = offset + 30 + len(name) + len(large) + 4
        padding = -start % ALIGNMENT
        extra = large + struct.pack("<HH", 0x4246, padding) + bytes(padding)
        short = min(size, _LARGE)
        fields = struct.pack("<HHHHHIII", 45, 0, 0, 0, 0x21, crc, short, short)
        self._file.write(b"PK\3\4" + fields + struct.pack("<HH", len(name), len(extra)) + name + extra)

        wide = [size, size] if size >= _LARGE else []
        wide += [offset] if offset >= _LARGE else []
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        rest = struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, min(offset, _LARGE))
        self._directory += b"PK\1\2" + struct.pack("<H", 45) + fields + rest + name + extra
        self._records += 1

    def finish(self) -> None:
        """Writes the zip directory at the end of the file."""
        start, size, count = self._file.tell() - self._start, len(self._directory), self._records
        self._file.write(self._directory)
        if start >= _LARGE or size >= _LARGE or count >= 0xFFFF:
            end = self._file.tell() - self._start
            self._file.write(b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, start))
            self._file.write(b"PK\6\7" + struct.pack("<IQI", 0, end, 1))
        short = min(count, 0xFFFF)
        end_fields = struct.pack("<HHHHIIH", 0, 0, short, short, min(size, _LARGE), min(start, _LARGE), 0)
        self._file.write(b"PK\5\6" + end_fields)


def write_object(file: NewFile, value: Any) -> tuple[int, int]:
    """Appends a small object, and returns its offset and length."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return file.tell(), file.write(buffer.getbuffer())


def write_tensor(file: NewFile, tensor: Tensor) -> tuple[int, int]:
    """Appends a tensor of any shape, and returns its offset and length; non-contiguous tensors are copied.

    Raises:
        CheckpointError: for a dtype that cannot be stored.
    """
    tensor, start = tensor.detach().contiguous(), file.tell()
    archive = ArchiveWriter(file, StorageSlot(0, TensorMeta.of(tensor)))
    archive.append(0, [tensor])
    archive.finish()
    return start, file.tell() - start
