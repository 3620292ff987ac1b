"""Finds sharded checkpoints in a folder: the one in the `latest` file, the newest, or all saves of one name."""

import os
import re
import warnings
from pathlib import Path

from ..core.io.untrusted_json import read_small
from ..errors import CheckpointError
from .manifest import MANIFEST, Manifest

LATEST = "latest"
# File names are shorter in all common file systems.
_LARGEST_POINTER = 4096


def is_committed(path: str | Path) -> bool:
    """Returns whether a directory has a valid manifest; does not check its files."""
    try:
        Manifest.load(Path(path))
    except CheckpointError:
        return False
    return True


def committed(parent: Path) -> list[Path]:
    """Returns a directory's complete checkpoints, newest first: by the number at the end of the name, then by time.

    `checkpoint-5.1` is a second save of step 5 (see `fresh_name`). Checkpoints that are removed concurrently are
    omitted.
    """
    checkpoints = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if not path.name.startswith(".tmp-") and (path / MANIFEST).is_file() and is_committed(path):
            number = re.search(r"(\d+)(?:\.(\d+))?$", path.name)
            step, again = (int(number[1]), int(number[2] or 0)) if number else (-1, 0)
            try:
                checkpoints.append((step, again, path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                continue
    return [path for *_, path in sorted(checkpoints, reverse=True)]


def list_saves(path: Path) -> list[Path]:
    """Returns the complete checkpoints saved under a name, newest first: `name` itself, `name.1` and so on."""
    same = re.compile(re.escape(path.name) + r"(?:\.(\d+))?")
    checkpoints = [
        (int(match[1] or 0), other) for other in committed(path.parent) if (match := same.fullmatch(other.name))
    ]
    return [other for _, other in sorted(checkpoints, reverse=True)]


def fresh_name(path: Path) -> Path:
    """Returns `path`, or `path.1` and so on if it exists: checkpoints are never overwritten."""
    taken, again = path, 0
    while os.path.lexists(taken):
        again += 1
        taken = path.with_name(f"{path.name}.{again}")
    return taken


def pointed_at(parent: Path, pointer: str = LATEST) -> Path | None:
    """Returns the path in the pointer file; `None` if the file is missing or does not hold a plain name."""
    try:
        name = read_small(parent / pointer, _LARGEST_POINTER).decode().strip()
    except (OSError, CheckpointError, UnicodeDecodeError):
        return None
    return parent / name if re.fullmatch(r"[^/\\\0]+", name) and name not in (".", "..") else None


def latest(parent: str | Path, pointer: str = LATEST) -> Path | None:
    """Returns the checkpoint to resume from: the one in the `latest` file, or, with a warning, the newest.

    If a checkpoint itself has the name of the pointer, there is no pointer file and no warning.
    """
    root = Path(parent)
    current = pointed_at(root, pointer)
    if current is not None and is_committed(current):
        return current
    candidates = committed(root)
    if not candidates:
        return None
    said = "missing or unreadable" if current is None else f"{current.name!r}, which is not a complete checkpoint"
    if not (root / pointer).is_dir():
        warnings.warn(f"{root / pointer} is {said}; falling back to {candidates[0].name}.", stacklevel=2)
    return candidates[0]


def find(parent: str | Path, name: str) -> Path:
    """Returns the checkpoint of exactly this name; raises `CheckpointError` if it is missing or incomplete."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{name!r} is not the name of a checkpoint in {parent}.")
    path = Path(parent) / name
    Manifest.load(path)
    return path
