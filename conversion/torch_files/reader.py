"""The zip files of `torch.save` that lie in a file one after another, as torch's distributed checkpoints have them.

Reading looks at the directory and the pickle of a blob, and then at the bytes of a tensor that are asked for.
"""

import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files import safetensors
from ...files.data_file import DataFile, Window, read_strided, row_major
from .safe_pickle import Named, Names, record_names, unpickle

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        str(dtype): dtype
        for dtype in (
            *safetensors.DTYPES,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
            torch.uint64,
            torch.uint32,
            torch.uint16,
            torch.complex128,
            torch.complex64,
        )
    }
)
# The dtypes that have a storage class of their own; those of others say their dtype beside it.
STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexDoubleStorage": torch.complex128,
        "ComplexFloatStorage": torch.complex64,
    }
)
LARGEST_PICKLE = 64 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a blob whose bytes were not read: shape, strides and offset are in entries of the storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str
    storage_nbytes: int


def _stored(storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any) -> StoredTensor:
    """Checks that a view stays inside of its storage."""
    kind, name, numel = storage
    numbers = (numel, offset, *shape, *stride)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) != len(stride):
        raise ValueError(f"a tensor of shape {shape} with strides {stride} at {offset}")
    held = kind if kind is not None else torch.uint8
    dtype = kind if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > numel * held.itemsize:
        raise ValueError(f"a tensor of shape {shape} with strides {stride} leaves its storage of {numel}")
    return StoredTensor(dtype, tuple(shape), tuple(stride), offset, name, numel * held.itemsize)


def _storage(identifier: Any) -> tuple[torch.dtype | None, str, int]:
    kind, storage, name, _, numel = identifier
    if kind != "storage" or not isinstance(storage, Named) or not isinstance(name, str):
        raise ValueError("it has an unknown persistent id")
    return STORAGES.get(storage.name.removeprefix("torch.")), name, numel


# torch/_utils.py: how tensors are made of storages.
_TENSORS: Names = MappingProxyType(
    {
        **DTYPES,
        **{f"torch.{name}": Named(f"torch.{name}") for name in STORAGES},
        "torch.storage.UntypedStorage": Named("torch.storage.UntypedStorage"),
        "torch.Size": Named("torch.Size", lambda arguments: tuple(arguments[0])),
        "torch._utils._rebuild_tensor_v2": Named("tensor", lambda a: _stored(a[0], a[1], a[2], a[3], None)),
        "torch._utils._rebuild_tensor_v3": Named("tensor", lambda a: _stored(a[0], a[1], a[2], a[3], a[6])),
        "torch._utils._rebuild_parameter": Named("parameter", lambda a: a[0]),
    }
)
# What else Megatron saves beside tensors (megatron/core/safe_globals.py).
_OBJECTS: Names = record_names(
    "_io.BytesIO",
    "argparse.Namespace",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "signal.Signals",
    "torch.device",
    "types.SimpleNamespace",
)
# Their enumerations and settings; none is looked up.
_MEGATRON = ("megatron.", "transformer_engine.")


class Blob:
    """What one `torch.save` wrote to a part of a file.

    Args:
        offset, length: the part of the file; all of it by default.

    Attributes:
        value: what was saved, with a `StoredTensor` for each tensor and records for objects.

    Raises:
        CheckpointError: naming the file, for one that is damaged, compressed or cut off, and for any class it names
            that is not among those that Megatron and torch save.
    """

    def __init__(self, file: DataFile, offset: int = 0, length: int | None = None):
        self._file, self._start = file, offset
        length = file.size - offset if length is None else length
        file.check(offset, length)
        self._where = f"{file.path}, bytes [{offset}, {offset + length})"
        try:
            with zipfile.ZipFile(Window(file, offset, length)) as archive:
                self._end = archive.start_dir
                infos = archive.infolist()
                # Nothing before and nothing behind: both would move what the directory says.
                if file.read(offset, min(length, 4)) != b"PK\3\4" or archive.comment:
                    raise ValueError("it does not begin and end with one")
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeError) as error:
            raise CheckpointError(f"{self._where} is no file of torch.save: {error}") from error
        self._records = {info.filename: info for info in infos}
        pickles = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(self._records) != len(infos) or len(pickles) != 1:
            raise CheckpointError(
                f"{self._where} is no file of torch.save: it has the records {list(self._records)[:8]}."
            )
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}byteorder" in self._records and self._record("byteorder") != b"little":
            raise CheckpointError(f"{self._where} was written on a machine of another byte order.")
        self.value = unpickle(self._record("data.pkl"), self._where, {**_OBJECTS, **_TENSORS}, _storage, _MEGATRON)

    def _locate(self, name: str) -> tuple[int, int]:
        """Finds where the bytes of a record begin in the file, and how many there are."""
        info = self._records.get(self._root + name)
        if info is None:
            raise CheckpointError(f"{self._where}: there is no record {name}.")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(f"{self._where}: record {name} is compressed or encrypted.")
        try:
            header = self._file.read(self._start + info.header_offset, 30)
            named, extra = struct.unpack_from("<HH", header, 26)
            written = self._file.read(self._start + info.header_offset + 30, named)
        except CheckpointError as error:
            raise CheckpointError(f"{self._where}: record {name} is cut off.") from error
        begin = info.header_offset + 30 + named + extra
        if header[:4] != b"PK\3\4" or written != info.filename.encode() or begin + info.file_size > self._end:
            raise CheckpointError(f"{self._where}: record {name} is not where the directory says.")
        return self._start + begin, info.file_size

    def _record(self, name: str) -> bytes:
        begin, size = self._locate(name)
        if size > LARGEST_PICKLE:
            raise CheckpointError(f"{self._where}: record {name} has {size} bytes, more than {LARGEST_PICKLE}.")
        return self._file.read(begin, size)

    def tensor(self) -> StoredTensor:
        """Returns the tensor, of any shape, that the blob is; `CheckpointError` for another object."""
        if not isinstance(self.value, StoredTensor):
            raise CheckpointError(f"{self._where} is not a tensor.")
        return self.value

    def read_into(self, stored: StoredTensor, starts: Sequence[int], out: Tensor) -> None:
        """Copies the box of a tensor that begins at `starts` into `out`, of any shape, reading little more than it.

        Raises:
            CheckpointError: the bytes are not there.
        """
        begin, size = self._locate(f"data/{stored.storage}")
        if size != stored.storage_nbytes:
            raise CheckpointError(f"{self._where}: {size} bytes where a storage has {stored.storage_nbytes}.")
        if out.numel():
            first = stored.offset + sum(start * step for start, step in zip(starts, stored.stride, strict=True))
            read_strided(self._file, begin, first, stored.stride, out)
        if out.nbytes == size and out.is_contiguous() and stored.stride == row_major(out.shape):
            self._compare(f"data/{stored.storage}", out)

    def _compare(self, name: str, whole: Tensor) -> None:
        """Compares a whole record with its checksum, where it has one: torch can leave it out."""
        expected = self._records[self._root + name].CRC
        if expected and zlib.crc32(whole.view(-1).view(torch.uint8).numpy().data) != expected:
            raise CheckpointError(f"{self._where}: record {name} has another checksum than it was written with.")

    def read(self, stored: StoredTensor) -> Tensor:
        """Reads a whole tensor of any shape."""
        # What is claimed is there before memory is taken for it.
        if torch.Size(stored.shape).numel() * stored.dtype.itemsize > stored.storage_nbytes:
            raise CheckpointError(f"{self._where}: {list(stored.shape)} entries repeat those of a smaller storage.")
        self._locate(f"data/{stored.storage}")
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(stored, [0] * len(stored.shape), out)
        return out


def read_saved(path: Path) -> Any:
    """Reads what a file of `torch.save` holds, without its tensors' bytes; see `Blob`."""
    with DataFile(path) as file:
        return Blob(file).value
