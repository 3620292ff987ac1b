"""Tensors of a checkpoint that are read on demand by a loader."""

from threading import Lock
from typing import Any

from torch import Tensor

from ..core.io.safetensors import TensorMeta
from .interfaces import WEIGHT, Key, Reader


class LazyTensor:
    """One weight of a reader; the transformers loader slices it like a tensor of a safetensors file.

    Args:
        lock: serializes reads: a reader has one file position, loaders use several threads.
    """

    def __init__(self, reader: Reader, key: Key, lock: Lock):
        self._reader, self._key, self._lock = reader, key, lock

    @property
    def entry(self) -> TensorMeta:
        return self._reader.entries[self._key]

    def get_shape(self) -> list[int]:
        """Returns the shape, with the interface of safetensors slices."""
        return list(self.entry.shape)

    def __getitem__(self, index: Any) -> Tensor:
        with self._lock:
            full = self._reader.read(self._key)
        part = full[index]
        # A view would keep the full tensor alive.
        return part if part.numel() == full.numel() else part.clone()


def lazy_weights(reader: Reader) -> dict[str, LazyTensor]:
    """Returns every weight of a reader, of any shape, by its name in the model."""
    lock = Lock()
    return {key.name: LazyTensor(reader, key, lock) for key in reader.entries if key.kind == WEIGHT}
