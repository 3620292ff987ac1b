"""Writes tensors and small objects one after another into a file, each as `torch.save` would."""

import io
import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .output import HashedFile

# What torch's pickles call the storages of dtypes that have one of their own.
_STORAGES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "DoubleStorage",
        torch.float32: "FloatStorage",
        torch.float16: "HalfStorage",
        torch.bfloat16: "BFloat16Storage",
        torch.int64: "LongStorage",
        torch.int32: "IntStorage",
        torch.int16: "ShortStorage",
        torch.int8: "CharStorage",
        torch.uint8: "ByteStorage",
        torch.bool: "BoolStorage",
    }
)
_ALIGNMENT = 64
# From here on a zip file gives sizes and offsets in 64 bits.
_LARGE = 0xFFFFFFFF


def write_object(file: HashedFile, value: Any) -> tuple[int, int]:
    """Appends a small object, and returns where it begins and how long it is."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return file.tell(), file.write(buffer.getbuffer())


def write_tensor(file: HashedFile, tensor: Tensor) -> tuple[int, int]:
    """Appends a tensor, and returns where it begins and how long it is. What is not contiguous is copied.

    The record of the data has no checksum, as with `torch.serialization.set_crc32_options(False)`: torch does not look
    at it, and it would take half as long again as hashing and writing.

    Raises:
        CheckpointError: for a dtype that cannot be stored.
    """
    tensor = tensor.detach().contiguous()
    start = file.tell()
    directory = bytearray()
    for name, data in (("data.pkl", _pickle(tensor)), ("byteorder", b"little"), ("version", b"3\n")):
        directory += _write_header(file, start, name, zlib.crc32(data), len(data))
        file.write(data)
    directory += _write_header(file, start, "data/0", 0, tensor.nbytes)
    file.write_tensor(tensor)
    _write_end(file, file.tell() - start, bytes(directory), 4)
    return start, file.tell() - start


def _pickle(tensor: Tensor) -> bytes:
    """`torch._utils._rebuild_tensor_v2(storage, 0, shape, stride, False, OrderedDict())` in protocol 2."""
    if tensor.dtype not in _STORAGES:
        raise CheckpointError(f"{tensor.dtype} cannot be stored in a torch checkpoint.")
    storage = b"(" + _text("storage") + b"ctorch\n" + _STORAGES[tensor.dtype].encode() + b"\n"
    storage += _text("0") + _text("cpu") + _integer(tensor.numel()) + b"tQ"
    shape, stride = (b"(" + b"".join(map(_integer, numbers)) + b"t" for numbers in (tensor.shape, tensor.stride()))
    hooks = b"ccollections\nOrderedDict\n)R"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _integer(0) + shape + stride + b"\x89" + hooks + b"tR"
    return b"\x80\x02" + call + b"."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode("ascii")


def _integer(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x09" + struct.pack("<qb", number, 0)


def _write_header(file: HashedFile, start: int, record: str, checksum: int, size: int) -> bytes:
    """The local header of a record, filled up so that the record begins at a multiple of 64 bytes of the blob.

    Returns:
        `bytes`: the record's entry in the directory.
    """
    name, offset, short = f"archive/{record}".encode(), file.tell() - start, min(size, _LARGE)
    fields = struct.pack("<HHHHHIII", 45, 0, 0, 0, 0x21, checksum, short, short)
    large = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
    padding = -(offset + 30 + len(name) + len(large) + 4) % _ALIGNMENT
    extra = large + struct.pack("<HH", 0x4246, padding) + bytes(padding)
    file.write(b"PK\3\4" + fields + struct.pack("<HH", len(name), len(extra)) + name + extra)
    wide = [size, size] if size >= _LARGE else []
    wide += [offset] if offset >= _LARGE else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    rest = struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, min(offset, _LARGE))
    return b"PK\1\2" + struct.pack("<H", 45) + fields + rest + name + extra


def _write_end(file: HashedFile, offset: int, directory: bytes, count: int) -> None:
    """The directory, whose place is given from the start of the blob."""
    file.write(directory)
    if offset >= _LARGE:
        end = offset + len(directory)
        fields = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(directory), offset)
        file.write(b"PK\6\6" + fields + b"PK\6\7" + struct.pack("<IQI", 0, end, 1))
    file.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), min(offset, _LARGE), 0))
