"""Finds sharded checkpoints in a folder: the one that `latest` names, the newest, all saves of one name."""

import os
import re
import warnings
from pathlib import Path

from ..core.io.untrusted_json import read_small
from ..errors import CheckpointError
from .manifest import MANIFEST, Manifest

LATEST = "latest"
# Names of files have no more bytes.
_LARGEST_POINTER = 4096


def is_committed(path: str | Path) -> bool:
    """Tells whether a directory has a valid manifest; its files are not looked at."""
    try:
        Manifest.load(Path(path))
    except CheckpointError:
        return False
    return True


def committed(parent: Path) -> list[Path]:
    """Lists a directory's complete checkpoints, newest first: by the number their name ends in, then by time.

    `checkpoint-5.1` is a second save of step 5 (see `fresh_name`). What somebody removes meanwhile is left out.
    """
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if not path.name.startswith(".tmp-") and (path / MANIFEST).is_file() and is_committed(path):
            number = re.search(r"(\d+)(?:\.(\d+))?$", path.name)
            step, again = (int(number[1]), int(number[2] or 0)) if number else (-1, 0)
            try:
                found.append((step, again, path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                continue
    return [path for *_, path in sorted(found, reverse=True)]


def saves_of(path: Path) -> list[Path]:
    """Lists the complete checkpoints saved under a name, newest first: `name` itself, `name.1` and so on."""
    same = re.compile(re.escape(path.name) + r"(?:\.(\d+))?")
    found = [(int(match[1] or 0), other) for other in committed(path.parent) if (match := same.fullmatch(other.name))]
    return [other for _, other in sorted(found, reverse=True)]


def fresh_name(path: Path) -> Path:
    """Returns `path`, or where that exists already `path.1` and so on: a checkpoint is never written over."""
    taken, again = path, 0
    while os.path.lexists(taken):
        again += 1
        taken = path.with_name(f"{path.name}.{again}")
    return taken


def pointed_at(parent: Path, pointer: str = LATEST) -> Path | None:
    """Returns what the pointer file names; `None` when there is none, or when it holds no plain name."""
    try:
        name = read_small(parent / pointer, _LARGEST_POINTER).decode().strip()
    except (OSError, CheckpointError, UnicodeDecodeError):
        return None
    return parent / name if re.fullmatch(r"[^/\\\0]+", name) and name not in (".", "..") else None


def latest(parent: str | Path, pointer: str = LATEST) -> Path | None:
    """Returns the checkpoint to resume from: the one that `latest` names, else the newest complete one, with a warning.

    Where a checkpoint is itself called `latest` there is no such file, and nothing to warn of.
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
    """Returns exactly this checkpoint; raises `CheckpointError` when it is missing or incomplete."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{name!r} is not the name of a checkpoint in {parent}.")
    path = Path(parent) / name
    Manifest.load(path)
    return path
