"""Content of `torch.save` files, in either format: tensors whose bytes are read on demand."""

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
# Dtypes with their own storage class; tensors of other dtypes store the dtype separately.
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
    """Metadata of a tensor in a blob whose bytes are not read; shape, strides and offset count storage elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str
    storage_nbytes: int


def _stored(storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any, pending: Any = None) -> StoredTensor:
    """Checks that a view stays inside its storage, and that no negation or conjugation is `pending`."""
    if pending:
        raise ValueError(f"a tensor with {safe_repr(pending)}: its values differ from the stored ones")
    kind, name, numel = storage
    layout_values = (numel, offset, *shape, *stride)
    if not all(type(number) is int and number >= 0 for number in layout_values) or len(shape) != len(stride):
        raise ValueError(
            f"a tensor has invalid shape {safe_repr(shape)}, strides {safe_repr(stride)} or offset {safe_repr(offset)}"
        )
    held = kind if kind is not None else torch.uint8
    dtype = kind if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > numel * held.itemsize:
        raise ValueError(
            f"a tensor of shape {safe_repr(shape)} with strides {safe_repr(stride)} exceeds its storage of {numel} "
            "elements"
        )
    return StoredTensor(dtype, tuple(shape), tuple(stride), offset, name, numel * held.itemsize)


def parse_storage(identifier: Any) -> tuple[torch.dtype | None, str, int]:
    kind, storage, name, _, numel = identifier
    if kind != "storage" or not isinstance(storage, Named) or not isinstance(name, str):
        raise ValueError("it has an unknown persistent id")
    return STORAGES.get(storage.name.removeprefix("torch.")), name, numel


# torch/_utils.py: functions that rebuild tensors from storages.
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
# Other objects that Megatron saves (megatron/core/safe_globals.py); loss scalers once had their own module
# (megatron/checkpointing.py, `_load_base_checkpoint`).
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
        # Python up to 3.11.3 pickles the members under their names in the module.
        **record_names(*(f"signal.{member.name}" for member in signal.Signals)),
    }
)
# Prefixes of Megatron's enumerations and settings; they are never imported.
MEGATRON = ("megatron.", "transformer_engine.")


class Saved(ABC):
    """A file of `torch.save`, or a range of a file.

    Attributes:
        file: the file; `where` describes it in messages.
        value: the saved value, with a `StoredTensor` for each tensor and records for objects.
    """

    file: DataFile
    where: str
    value: Any

    @abstractmethod
    def find(self, storage: str) -> tuple[int, int]:
        """Returns the offset in the file and the size of a storage's bytes."""

    def compare(self, storage: str, content: Tensor) -> None:  # noqa: B027 - the older format has no checksums
        """Compares a full storage, read into a tensor of any shape, with its checksum."""

    def tensor(self) -> StoredTensor:
        """Returns the tensor, of any shape, that was saved; raises `CheckpointError` for another object."""
        if not isinstance(self.value, StoredTensor):
            raise CheckpointError(f"{self.where} is not a tensor.")
        return self.value

    def _found(self, stored: StoredTensor) -> tuple[int, int]:
        begin, size = self.find(stored.storage)
        if size != stored.storage_nbytes:
            raise CheckpointError(
                f"{self.where}: a storage has {size} bytes, expected {safe_repr(stored.storage_nbytes)}."
            )
        return begin, size

    def read_into(self, stored: StoredTensor, starts: Sequence[int], out: Tensor) -> None:
        """Copies the box of a tensor that begins at `starts` into `out`, of any shape, reading little more than it.

        Raises:
            CheckpointError: the bytes are missing.
        """
        begin, size = self._found(stored)
        if out.numel():
            first = stored.offset + sum(start * step for start, step in zip(starts, stored.stride, strict=True))
            read_strided(self.file, begin, first, stored.stride, out)
        if out.nbytes == size and out.is_contiguous() and stored.stride == row_major(out.shape):
            self.compare(stored.storage, out)

    def read(self, stored: StoredTensor, memory: Memory = FRESH) -> Tensor:
        """Reads a full tensor of any shape."""
        # Check that the storage has this many bytes before allocating memory.
        if math.prod(stored.shape) * stored.dtype.itemsize > stored.storage_nbytes:
            raise CheckpointError(
                f"{self.where}: a tensor of shape {safe_repr(stored.shape)} is an expanded view of a smaller storage."
            )
        self._found(stored)
        out = memory.empty(stored.shape, stored.dtype)
        self.read_into(stored, [0] * len(stored.shape), out)
        return out
