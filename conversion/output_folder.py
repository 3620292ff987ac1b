"""Output directory of a conversion: hidden until it is complete and has been read back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from ..core.io.atomic_folder import StagedFolder
from ..core.io.checksums import FileDigest, NewFile, hash_file
from ..core.io.safe_paths import sync_directory
from ..errors import CheckpointError


class Output:
    """A directory that appears under its name once everything in it is written and read back.

    Args:
        target: must not exist.
        expected_bytes: lower bound on the bytes to be written, to check the free space.
        on_read_back: called by `commit` with a number of bytes read back and with the total.

    Attributes:
        directory: where files are written until `commit`.

    Raises:
        CheckpointError: the target exists or its parent cannot be written to, or too little space is free.
    """

    def __init__(
        self,
        target: str | Path,
        expected_bytes: int = 0,
        on_read_back: Callable[[int, int], object] = lambda size, total: None,
    ):
        self._stage = StagedFolder(target)
        self.target, self.directory = self._stage.target, self._stage.path
        self._files: list[NewFile] = []
        self._on_read_back = on_read_back
        self._last: list[Callable[[], None]] = []
        try:
            self._stage.open()
            self._stage.require_space(expected_bytes)
        except CheckpointError:
            self._stage.discard()
            raise
        except OSError as error:
            self._stage.discard()
            raise CheckpointError(f"{self.target} cannot be written: {error}") from error

    def create(self, name: str) -> NewFile:
        """Creates a file at a path relative to the directory; `commit` closes it."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = NewFile(path)
        self._files.append(file)
        return file

    def add(self, name: str, content: str | bytes) -> None:
        """Writes a small file."""
        self.create(name).write(content.encode() if isinstance(content, str) else content)

    def before_commit(self, action: Callable[[], None]) -> None:
        """Registers an action to run after everything else is written: for files that list the others."""
        self._last.append(action)

    def digests(self) -> dict[str, FileDigest]:
        """Returns sizes and digests of all files so far, by relative path."""
        return {file.path.relative_to(self.directory).as_posix(): file.digest for file in self._files}

    def commit(self) -> None:
        """Reads every file back, compares it with the data passed in, and renames the directory.

        Raises:
            CheckpointError: naming a file whose content differs.
        """
        try:
            for action in self._last:
                action()
            total = sum(file.size for file in self._files)
            # One thread flushes files to disk while this one reads them back.
            with ThreadPoolExecutor(1) as thread:
                durable = [thread.submit(file.close) for file in self._files]
                for file in self._files:
                    if hash_file(file.path, lambda size: self._on_read_back(size, total)) != file.digest:
                        raise CheckpointError(f"{file.path} was read back with different content than was written.")
                for future in durable:
                    future.result()
            for path in [self.directory, *self.directory.rglob("*")]:
                if path.is_dir():
                    sync_directory(path)
            self._stage.publish()
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
        self._stage.discard()
