"""The directory that a conversion writes: unseen until it is complete, and read back before it is shown."""

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from blake3 import blake3
from torch import Tensor

from ..checkpoint.shards import BLOCK, FileEntry, hash_file, sync_directory
from ..errors import CheckpointError


class HashedFile:
    """A new file written from its start to its end, whose digest is that of what was handed in.

    It has the methods of a binary file that `torch.save` and `zipfile` need of one that cannot seek.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._digest = blake3()
        self._file: IO[bytes] = open(path, "xb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self._digest.update(block)
            while block:
                block = block[os.write(self._file.fileno(), block) :]
        self.size += len(view)
        return len(view)

    def write_tensor(self, tensor: Tensor) -> int:
        """The bytes of a tensor in row-major order."""
        if not tensor.numel():
            return 0
        return self.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def seekable(self) -> bool:
        return False

    @property
    def entry(self) -> FileEntry:
        """What the file contains, if all went well."""
        return FileEntry(self.size, self._digest.hexdigest())

    def discard(self) -> None:
        """Closes the file, which is going to be deleted."""
        with contextlib.suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """Makes the file durable."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _is_in_use(directory: str) -> bool:
    """Whether another process is writing there."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class Output:
    """A directory that appears under its name when everything in it was written and read back.

    Args:
        target (`str` or `Path`): must not exist.
        expected_bytes (`int`): what is going to be written, for a look at the free space.

    Attributes:
        directory (`Path`): where files are written until `commit`.

    Raises:
        CheckpointError: the target exists or its parent cannot be written to, or too little space is free.
    """

    def __init__(self, target: str | Path, expected_bytes: int = 0):
        self.target = Path(os.path.abspath(target))
        parent = self.target.parent
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} exists; give a folder that does not.")
        self._files: list[HashedFile] = []
        self._last: list[Callable[[], None]] = []
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers():
                shutil.rmtree(leftover)
            free = shutil.disk_usage(parent).free
            if expected_bytes > free:
                raise CheckpointError(
                    f"{self.target}: {expected_bytes:,} bytes are needed and {free:,} are free in {parent}."
                )
            self.directory = parent / f".tmp-{self.target.name}-{uuid.uuid4().hex}"
            self.directory.mkdir()
            # Held as long as this process writes here.
            self._lock = os.open(self.directory, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error

    def _leftovers(self) -> Iterator[Path]:
        """What interrupted conversions to the same target left."""
        pattern = re.compile(rf"\.tmp-{re.escape(self.target.name)}-[0-9a-f]{{32}}")
        for entry in os.scandir(self.target.parent):
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and not _is_in_use(entry.path):
                yield Path(entry.path)

    def create(self, name: str) -> HashedFile:
        """A new file at a path relative to the directory; `commit` closes it."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = HashedFile(path)
        self._files.append(file)
        return file

    def add(self, name: str, content: str | bytes) -> None:
        """A small file."""
        self.create(name).write(content.encode() if isinstance(content, str) else content)

    def before_commit(self, action: Callable[[], None]) -> None:
        """Calls this when everything else has been written: files that name the others."""
        self._last.append(action)

    def entries(self) -> dict[str, FileEntry]:
        """Sizes and digests of all files so far, by relative path."""
        return {file.path.relative_to(self.directory).as_posix(): file.entry for file in self._files}

    def commit(self) -> None:
        """Reads every file back, compares it with what was handed in, and renames the directory.

        Raises:
            CheckpointError: naming the file whose content is another.
        """
        try:
            for action in self._last:
                action()
            # One thread waits for the disk while another reads.
            with ThreadPoolExecutor(1) as thread:
                durable = [thread.submit(file.close) for file in self._files]
                for file in self._files:
                    if hash_file(file.path) != file.entry:
                        raise CheckpointError(f"{file.path} was read back with other content than was written.")
                for future in durable:
                    future.result()
            for path in [self.directory, *self.directory.rglob("*")]:
                if path.is_dir():
                    sync_directory(path)
            if os.path.lexists(self.target):
                raise CheckpointError(f"{self.target} has come into existence during the conversion.")
            os.rename(self.directory, self.target)
            sync_directory(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.commit()
                os.close(self._lock)
                return
            except BaseException:
                self._remove()
                raise
        self._remove()
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error

    def _remove(self) -> None:
        for file in self._files:
            file.discard()
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
