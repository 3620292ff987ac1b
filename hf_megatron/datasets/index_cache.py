"""On-disk cache of order indices, which later runs and other processes memory-map instead of building them.

A folder is named by a hash of all inputs of the indices, which its `key.json` lists as well. One process builds missing
indices while other processes of the host wait; if the folder is not writable, each process builds its own in memory.
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
# Version of the folder format; folders of other versions are not read.
_FORMAT = 1
_KEY = "key.json"


def cached_arrays(key: Mapping[str, Any], directory: Path | None, make: Callable[[], Arrays]) -> Arrays:
    """Returns arrays from the folder of their key; builds and stores them if they are missing.

    Args:
        key: all inputs of the arrays, JSON-compatible.
        directory (`Path`, *optional*): parent of all folders; without it nothing is cached.
        make (`Callable`): returns the arrays by name.
    """
    if directory is None:
        return make()
    key_text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    folder = directory / hashlib.sha256(key_text.encode()).hexdigest()[:32]
    arrays = _read(folder, key_text)
    if arrays is not None:
        return arrays
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            # Another process may have built it before the lock was acquired.
            arrays = _read(folder, key_text)
            return _written(folder, key_text, make()) if arrays is None else arrays
    except _NotWritten as error:
        warnings.warn(f"{directory}: the sample order is kept in memory: {error.reason}", stacklevel=2)
        return error.arrays
    except OSError as error:
        # A read-only folder or a full disk.
        warnings.warn(f"{directory}: the sample order is kept in memory: {error}", stacklevel=2)
        return make()


class MappedArrays:
    """Base class whose memory-mapped arrays are pickled as file paths, so that worker processes map them again."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _File.of(value) for name, value in vars(self).items()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        read = {name: value.map() if isinstance(value, _File) else value for name, value in state.items()}
        vars(self).update(read)


class _File:
    """The file of one array."""

    def __init__(self, path: str):
        self.path = path

    @classmethod
    def of(cls, value: Any) -> Any:
        """Returns the file of a fully mapped array, and any other value unchanged."""
        # A view of a memmap has `filename` as well, but is only a part of the file.
        is_full_file = isinstance(value, np.memmap) and not isinstance(value.base, np.ndarray)
        return cls(str(value.filename)) if is_full_file and value.filename is not None else value

    def map(self) -> np.ndarray:
        """Returns the memory-mapped array."""
        array: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        return array


class _NotWritten(Exception):
    """Raised when a folder cannot be written; carries the arrays."""

    def __init__(self, reason: OSError, arrays: Arrays):
        self.reason, self.arrays = reason, arrays


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for the lock of a folder, which is shared by the host, or the file system if that supports locks."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(folder: Path, key_text: str) -> Arrays | None:
    """Returns the memory-mapped arrays of a folder; `None` if it is missing or incomplete."""
    try:
        content = json.loads((folder / _KEY).read_text(encoding="utf-8"))
        # Different keys with the same hash prefix would share a folder.
        if content["key"] != key_text:
            return None
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in content["arrays"]}
    except (OSError, ValueError, EOFError, TypeError, KeyError):
        return None


def _written(folder: Path, key_text: str, arrays: Arrays) -> Arrays:
    """Writes a folder, renames it into place when it is complete, and returns its memory-mapped arrays."""
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
                json.dump({"key": key_text, "arrays": [*arrays]}, file)
                file.flush()
                os.fsync(file.fileno())
            # If locks are per host, another host may have written it; keep its files, which may be mapped there.
            existing = _read(folder, key_text)
            if existing is not None:
                return existing
            # Replace a damaged folder.
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except OSError as error:
            raise _NotWritten(error, arrays) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _read(folder, key_text) or arrays
