"""Tensors of a checkpoint that are read when a loader asks for them."""

from threading import Lock
from typing import Any

from torch import Tensor

from ..core.io.safetensors import TensorMeta
from .interfaces import WEIGHT, Key, Reader


class LazyTensor:
    """One weight of a reader; transformers' loader slices it as it slices those of safetensors files.

    Args:
        lock: readers have one position in their file, loaders several threads.
    """

    def __init__(self, reader: Reader, key: Key, lock: Lock):
        self._reader, self._key, self._lock = reader, key, lock

    @property
    def entry(self) -> TensorMeta:
        return self._reader.entries[self._key]

    def get_shape(self) -> list[int]:
        """Returns the shape, as loaders ask safetensors for it."""
        return list(self.entry.shape)

    def __getitem__(self, index: Any) -> Tensor:
        with self._lock:
            unsharded = self._reader.read(self._key)
        part = unsharded[index]
        # A view of a part would keep the whole alive.
        return part if part.numel() == unsharded.numel() else part.clone()


def lazy_weights(reader: Reader) -> dict[str, LazyTensor]:
    """Returns every weight of a reader, of any shape, by its name in the model."""
    lock = Lock()
    return {key.name: LazyTensor(reader, key, lock) for key in reader.entries if key.kind == WEIGHT}
