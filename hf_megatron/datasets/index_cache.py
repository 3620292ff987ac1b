"""Indices of orders in files, so that whoever opens the same data again maps them instead of making them.

A folder has the name of a hash of everything that the indices are made of, which its `key.json` says too. One process
makes what is missing while others of the host wait for it; where nothing can be written each makes its own in memory.
"""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
# Of what is in the folders; files of another number are not read.
_FORMAT = 1
_KEY = "key.json"


def cached_arrays(key: Mapping[str, Any], directory: Path | None, make: Callable[[], Arrays]) -> Arrays:
    """Returns arrays from the folder of their key, or makes them and leaves them there.

    Args:
        key: all that the arrays depend on, as JSON holds it.
        directory (`Path`, *optional*): of all folders; without one the arrays are made.
        make (`Callable`): makes the arrays, by their names.
    """
    if directory is None:
        return make()
    said = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    folder = directory / hashlib.sha256(said.encode()).hexdigest()[:32]
    found = _read(folder, said)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            # Whoever was before may have made it.
            found = _read(folder, said)
            return _written(folder, said, make()) if found is None else found
    except _NotWritten as error:
        warnings.warn(f"{directory}: the order of samples is kept in memory: {error.reason}", stacklevel=2)
        return error.arrays
    except OSError as error:
        # A folder of others, or a disk that takes nothing.
        warnings.warn(f"{directory}: the order of samples is kept in memory: {error}", stacklevel=2)
        return make()


class MappedArrays:
    """What has arrays as attributes, of which other processes are told the files of those that are mapped."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _File.of(value) for name, value in vars(self).items()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        read = {name: value.map() if isinstance(value, _File) else value for name, value in state.items()}
        vars(self).update(read)


class _File:
    """A file of one array."""

    def __init__(self, path: str):
        self.path = path

    @classmethod
    def of(cls, value: Any) -> Any:
        """Returns the file of a mapped array, and any other value as it is."""
        # A view of one says its file too, and is not all of it.
        is_replicated = isinstance(value, np.memmap) and not isinstance(value.base, np.ndarray)
        return cls(str(value.filename)) if is_replicated and value.filename is not None else value

    def map(self) -> np.ndarray:
        """Maps the array."""
        found: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        return found


class _NotWritten(Exception):
    """Has the arrays of a folder that could not be written."""

    def __init__(self, reason: OSError, arrays: Arrays):
        self.reason, self.arrays = reason, arrays


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process of the host, or of the file system where it knows locks, makes the same folder."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(folder: Path, said: str) -> Arrays | None:
    """Maps the arrays of a folder; `None` where there is none that is whole."""
    try:
        found = json.loads((folder / _KEY).read_text(encoding="utf-8"))
        # Another key of the same hash would be another folder's.
        if found["key"] != said:
            return None
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in found["arrays"]}
    except (OSError, ValueError, EOFError, TypeError, KeyError):
        return None


def _written(folder: Path, said: str, arrays: Arrays) -> Arrays:
    """Writes a folder, which gets its name when it is whole, and maps what it holds."""
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        try:
            partial.mkdir()
            for name, array in arrays.items():
                with open(partial / f"{name}.npy", "wb") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
            with open(partial / _KEY, "w", encoding="utf-8") as file:
                json.dump({"key": said, "arrays": [*arrays]}, file)
                file.flush()
                os.fsync(file.fileno())
            # Another host may have made it, where locks are each host's own: who has mapped it needs its files.
            found = _read(folder, said)
            if found is not None:
                return found
            # One that was there is damaged.
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except OSError as error:
            raise _NotWritten(error, arrays) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _read(folder, said) or arrays
