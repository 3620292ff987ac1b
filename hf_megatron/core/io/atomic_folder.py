"""Folder that appears under its name only once it is completely written, even if the writer is killed.

It is written as `.tmp-<name>-<id>` next to its target and renamed at the end. The writer holds a lock on
`.tmp-<name>-<id>.lock`: a folder left by an interrupted writer has a lock file that is not locked, and the next writer
removes both. The lock file is next to the folder rather than inside, so that it exists before the folder does and for
as long as the folder has its temporary name.
"""

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import CheckpointError
from .safe_paths import sync_directory

_TEMPORARY = re.compile(r"\.tmp-(?P<name>.+)-[0-9a-f]{32}")


class StagedFolder:
    """Temporary folder of a target; one process opens it, and publishes or discards it.

    Args:
        target (`str` or `Path`): the final folder; must not exist.
        token (`str`, *optional*): 32 hexadecimal digits, shared by ranks that write the folder together.

    Attributes:
        path (`Path`): the temporary folder to write to.
    """

    def __init__(self, target: str | Path, token: str | None = None):
        self.target = Path(os.path.abspath(target))
        self.parent = self.target.parent
        self.path = _temporary(self.target, token or uuid.uuid4().hex)
        self._lock: int | None = None

    def open(self, on_step: Callable[[str], None] = lambda step: None) -> None:
        """Creates the folder, and removes leftovers of interrupted writers next to it.

        Args:
            on_step: called at every I/O point with its name; for fault tests.

        Raises:
            CheckpointError: the target exists.
            OSError: from the file system.
        """
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} exists; give a folder that does not.")
        self.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.parent, self.target.name)
        on_step("leftovers")
        self._lock = _lock(self.path)
        self.path.mkdir()
        on_step("directory")

    def require_space(self, expected: int) -> None:
        """Checks that the free disk space is sufficient for `expected` bytes.

        Raises:
            CheckpointError: there is too little space.
        """
        free = shutil.disk_usage(self.parent).free
        if expected > free:
            raise CheckpointError(f"{self.parent}: {expected:,} bytes are needed and {free:,} are free.")

    def publish(self, on_step: Callable[[str], None] = lambda step: None) -> None:
        """Renames the folder to its target; its files must be durable already.

        Raises:
            CheckpointError: the target has been created in the meantime.
            OSError: from the file system.
        """
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} was created by another process during the write.")
        os.rename(self.path, self.target)
        on_step("rename")
        sync_directory(self.parent)
        on_step("rename durable")
        self._unlock()

    def discard(self) -> None:
        """Removes the temporary folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            _unlock(self.path, lock)


def remove_folder(path: Path) -> None:
    """Deletes a folder so that an interruption leaves no partial folder under its name."""
    trash = _temporary(path, uuid.uuid4().hex)
    lock = _lock(trash)
    try:
        os.rename(path, trash)
        shutil.rmtree(trash)
    finally:
        _unlock(trash, lock)


def _temporary(target: Path, token: str) -> Path:
    return target.parent / f".tmp-{target.name}-{token}"


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _lock(folder: Path) -> int:
    while True:
        descriptor = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT, 0o600)
        # On a file system without locks, only writers of the same target treat this folder as a leftover.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _lock_file(folder).exists():
            return descriptor
        # Another writer removed the file before it was locked, as a leftover; retry.
        os.close(descriptor)


def _unlock(folder: Path, descriptor: int) -> None:
    _lock_file(folder).unlink(missing_ok=True)
    os.close(descriptor)


def _remove_leftovers(parent: Path, name: str) -> None:
    """Removes the temporary folders of writers that no longer run.

    Args:
        name: target name of the calling writer.
    """
    for folder in {Path(entry.path.removesuffix(".lock")) for entry in os.scandir(parent)}:
        match = _TEMPORARY.fullmatch(folder.name)
        if match is None or folder.is_symlink():
            continue
        with _locked_if_left(folder, match["name"] == name) as is_left:
            if is_left:
                # Another writer may be removing the same leftover.
                shutil.rmtree(folder, ignore_errors=True)
                _lock_file(folder).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked_if_left(folder: Path, same_target: bool) -> Iterator[bool]:
    try:
        descriptor = os.open(_lock_file(folder), os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    except PermissionError:
        # Owned by another user, whose writers remove their own leftovers.
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_left = True
    except BlockingIOError:
        is_left = False
    except OSError:
        is_left = same_target
    try:
        yield is_left
    finally:
        os.close(descriptor)
