"""What `torch.save` wrote, in either of its formats: tensors whose bytes are read when they are asked for."""

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...core.io import safetensors
from ...core.io.buffer_pool import FRESH, Memory
from ...core.io.random_access_file import DataFile, read_strided, row_major
from ...core.text import safe_repr
from ...errors import CheckpointError
from .safe_pickle import Named, Names, enumeration_names, record_names

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


def _stored(storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any, pending: Any = None) -> StoredTensor:
    """Checks that a view stays inside of its storage, and that no change of sign or conjugate is `pending`."""
    if pending:
        raise ValueError(f"a tensor with {safe_repr(pending)}: its entries are not those that are stored")
    kind, name, numel = storage
    numbers = (numel, offset, *shape, *stride)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) != len(stride):
        raise ValueError(
            f"a tensor of shape {safe_repr(shape)} with strides {safe_repr(stride)} at {safe_repr(offset)}"
        )
    held = kind if kind is not None else torch.uint8
    dtype = kind if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > numel * held.itemsize:
        raise ValueError(
            f"a tensor of shape {safe_repr(shape)} with strides {safe_repr(stride)} leaves its storage of {numel}"
        )
    return StoredTensor(dtype, tuple(shape), tuple(stride), offset, name, numel * held.itemsize)


def storage_of(identifier: Any) -> tuple[torch.dtype | None, str, int]:
    kind, storage, name, _, numel = identifier
    if kind != "storage" or not isinstance(storage, Named) or not isinstance(name, str):
        raise ValueError("it has an unknown persistent id")
    return STORAGES.get(storage.name.removeprefix("torch.")), name, numel


# torch/_utils.py: how tensors are made of storages.
TENSORS: Names = MappingProxyType(
    {
        **DTYPES,
        **{f"torch.{name}": Named(f"torch.{name}") for name in STORAGES},
        "torch.storage.UntypedStorage": Named("torch.storage.UntypedStorage"),
        "torch.Size": Named("torch.Size", lambda arguments: tuple(arguments[0])),
        "torch._utils._rebuild_tensor_v2": Named("tensor", lambda a: _stored(a[0], a[1], a[2], a[3], None, *a[6:7])),
        "torch._utils._rebuild_tensor_v3": Named("tensor", lambda a: _stored(a[0], a[1], a[2], a[3], a[6], *a[7:8])),
        "torch._utils._rebuild_parameter": Named("parameter", lambda a: a[0]),
    }
)
# What else Megatron saves beside tensors (megatron/core/safe_globals.py); loss scalers once lay in a module of
# their own (megatron/checkpointing.py, `_load_base_checkpoint`).
OBJECTS: Names = MappingProxyType(
    {
        **record_names(
            "_io.BytesIO",
            "argparse.Namespace",
            "fp16.loss_scaler.DynamicLossScaler",
            "fp16.loss_scaler.LossScaler",
            "numpy._core.multiarray._reconstruct",
            "numpy._core.multiarray.scalar",
            "numpy.core.multiarray._reconstruct",
            "numpy.core.multiarray.scalar",
            "numpy.dtype",
            "numpy.dtypes.UInt32DType",
            "numpy.ndarray",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
            "torch.device",
            "types.SimpleNamespace",
        ),
        **enumeration_names("signal.Signals"),
        # Python up to 3.11.3 writes the members by the names that the module has them under.
        **record_names(*(f"signal.{member.name}" for member in signal.Signals)),
    }
)
# Their enumerations and settings; none is looked up.
MEGATRON = ("megatron.", "transformer_engine.")


class Saved(ABC):
    """A file of `torch.save`, or a part of one.

    Attributes:
        file: that it lies in, `where` for messages.
        value: what was saved, with a `StoredTensor` for each tensor and records for objects.
    """

    file: DataFile
    where: str
    value: Any

    @abstractmethod
    def find(self, storage: str) -> tuple[int, int]:
        """Finds where the bytes of a storage begin in the file, and how many there are."""

    def compare(self, storage: str, unsharded: Tensor) -> None:  # noqa: B027 - the older format has no checksums
        """Compares a whole storage, read into a tensor of any shape, with its checksum."""

    def tensor(self) -> StoredTensor:
        """Returns the tensor, of any shape, that the blob is; `CheckpointError` for another object."""
        if not isinstance(self.value, StoredTensor):
            raise CheckpointError(f"{self.where} is not a tensor.")
        return self.value

    def _found(self, stored: StoredTensor) -> tuple[int, int]:
        begin, size = self.find(stored.storage)
        if size != stored.storage_nbytes:
            raise CheckpointError(f"{self.where}: {size} bytes where a storage has {safe_repr(stored.storage_nbytes)}.")
        return begin, size

    def read_into(self, stored: StoredTensor, starts: Sequence[int], out: Tensor) -> None:
        """Copies the box of a tensor that begins at `starts` into `out`, of any shape, reading little more than it.

        Raises:
            CheckpointError: the bytes are not there.
        """
        begin, size = self._found(stored)
        if out.numel():
            first = stored.offset + sum(start * step for start, step in zip(starts, stored.stride, strict=True))
            read_strided(self.file, begin, first, stored.stride, out)
        if out.nbytes == size and out.is_contiguous() and stored.stride == row_major(out.shape):
            self.compare(stored.storage, out)

    def read(self, stored: StoredTensor, memory: Memory = FRESH) -> Tensor:
        """Reads a whole tensor of any shape."""
        # What is claimed is there before memory is taken for it.
        if math.prod(stored.shape) * stored.dtype.itemsize > stored.storage_nbytes:
            raise CheckpointError(f"{self.where}: {safe_repr(stored.shape)} entries repeat those of a smaller storage.")
        self._found(stored)
        out = memory.empty(stored.shape, stored.dtype)
        self.read_into(stored, [0] * len(stored.shape), out)
        return out
