"""Reader of `torch.save` files from before torch 1.6, which are no zip files: pickles followed by the storages.

Source: torch/serialization.py, `_legacy_save`.
"""

from typing import Any

import torch

from ...core.io.random_access_file import DataFile
from ...errors import CheckpointError
from .safe_pickle import unpickle_first
from .torch_save import LARGEST_PICKLE, MEGATRON, OBJECTS, TENSORS, Saved, parse_storage

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
# Size of the element count at the start of a storage.
_COUNT = 8


class Stream(Saved):
    """A file of the older format.

    Raises:
        CheckpointError: naming the file, if it is damaged, truncated or longer than stated, or names a class that is
            not among the ones that Megatron and torch save.
    """

    def __init__(self, file: DataFile):
        self.file, self.where = file, str(file.path)
        self._numels: dict[str, tuple[torch.dtype, int]] = {}
        self._data, self._end = file.read(0, min(file.size, LARGEST_PICKLE)), 0
        if self._next() != _MAGIC or self._next() != _VERSION:
            raise CheckpointError(f"{self.where} is not a torch.save file.")
        system = self._next()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CheckpointError(f"{self.where} was written on a machine with a different byte order.")
        self.value = self._next()
        keys = self._next()
        del self._data
        self._places = self._located(keys)

    def _next(self) -> Any:
        names = {**OBJECTS, **TENSORS}
        value, length = unpickle_first(self._data[self._end :], self.where, names, self._storage, MEGATRON)
        self._end += length
        return value

    def _storage(self, identifier: Any) -> tuple[torch.dtype | None, str, int]:
        kind, storage, name, place, numel, view = identifier
        if view is not None:
            raise ValueError("a storage is a view of another one")
        dtype, name, numel = parse_storage((kind, storage, name, place, numel))
        if dtype is None or self._numels.setdefault(name, (dtype, numel)) != (dtype, numel):
            raise ValueError("a storage has two sizes")
        return dtype, name, numel

    def _located(self, keys: Any) -> dict[str, tuple[int, int]]:
        named = isinstance(keys, list) and all(type(key) is str for key in keys)
        if not named or len(keys) != len(self._numels) or set(keys) != self._numels.keys():
            raise CheckpointError(f"{self.where} is damaged: its storages do not match its tensors.")
        places, position = {}, self._end
        for key in keys:
            dtype, numel = self._numels[key]
            self.file.check(position, _COUNT)
            if int.from_bytes(self.file.read(position, _COUNT), "little") != numel:
                raise CheckpointError(f"{self.where} is damaged: the size of a storage does not match its tensors.")
            places[key] = position + _COUNT, numel * dtype.itemsize
            position += _COUNT + numel * dtype.itemsize
        if position != self.file.size:
            raise CheckpointError(
                f"{self.where} is damaged: it has {self.file.size} bytes, but its storages end at {position}."
            )
        return places

    def find(self, storage: str) -> tuple[int, int]:
        if storage not in self._places:
            raise CheckpointError(f"{self.where}: there is no storage {storage}.")
        return self._places[storage]
