"""Folder structure of Megatron's checkpoints of a run (`megatron/training/checkpointing.py`)."""

import re
from pathlib import Path

from ...core.io.safe_paths import is_file
from ...errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def folder_name(iteration: int | None) -> str:
    """Returns the name of a checkpoint's folder; weights without an iteration are a release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def tracker_text(iteration: int | None) -> str:
    """Returns the content of the tracker file, which points to the newest checkpoint."""
    return RELEASE if iteration is None else str(iteration)


def iteration_folder(path: Path) -> Path:
    """Returns the folder that the tracker file points to, or the folder itself if there is no tracker file.

    Raises:
        CheckpointError: the tracker has no valid iteration, or its folder is missing.
    """
    tracker = path / TRACKER
    if not is_file(tracker):
        return path
    with open(tracker, "rb") as file:
        text = file.read(64).decode("ascii", "replace").strip()
    if text != RELEASE and not re.fullmatch(r"[0-9]{1,12}", text):
        raise CheckpointError(f"{tracker} contains {text!r}, expected an iteration number or {RELEASE!r}.")
    folder = path / folder_name(None if text == RELEASE else int(text))
    if not folder.is_dir():
        raise CheckpointError(f"{tracker} refers to {folder.name}, which is missing from {path}.")
    return folder
