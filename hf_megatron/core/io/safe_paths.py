"""Validation of untrusted file names, and writes that survive a power failure."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import CheckpointError
from ..text import safe_repr

# Maximum length of one path component in bytes, in all common file systems.
_LONGEST_PART = 255


def is_plain_name(name: str) -> bool:
    """Returns whether an untrusted name stays inside the folder it is written to."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name == "/".join(parts) and ".." not in parts and not {"\\", "\0"} & set(name)


def inside(directory: Path, name: str) -> Path:
    """Joins a folder and the name of a file in it; links of the Hub's cache into its `blobs` folder are allowed.

    Raises:
        CheckpointError: the name or its links lead out of the folder, or no file can have the name.
    """
    if os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise CheckpointError(f"{directory} references the file {safe_repr(name)}, which is outside the folder.")
    if any(len(part.encode("utf-8", "surrogatepass")) > _LONGEST_PART for part in Path(name).parts):
        raise CheckpointError(f"{directory} references the file {safe_repr(name)}: the name is too long.")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{directory} references the file {safe_repr(name)}: the name is invalid.") from error
    real, root = Path(os.path.realpath(directory / name)), Path(os.path.realpath(directory))
    allowed = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise CheckpointError(f"{directory / name} leads out of the checkpoint, to {real}.")
    return directory / name


def is_file(path: Path) -> bool:
    """Returns whether a regular file, or a link to one, exists at this path.

    Raises:
        CheckpointError: the path is something else.
    """
    if path.is_file() or not os.path.lexists(path):
        return path.is_file()
    what = "a folder" if path.is_dir() else "a named pipe" if path.is_fifo() else "not a regular file"
    raise CheckpointError(f"{path} is {what if path.exists() else 'a link to nothing'}: expected a file.")


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file that appears under its name when it is complete; an existing file is kept until then."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Writes a small file that survives a power failure; its name survives after `sync_directory`."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Fsyncs a folder, so that the names in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
