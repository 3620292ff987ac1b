"""Target folder of a pull: the file that makes it a checkpoint is placed last, and omitted files are recorded."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.reader import PARTIAL
from ...core.io.checksums import BLOCK
from ...core.io.safe_paths import sync_directory, write_durably
from .push_selection import INDEX, weight_map

# Subfolder that holds the manifest or index until all other files have arrived.
WAITING = ".pull"
# Subfolder that `from_pretrained` reads for a partial folder of Hugging Face files: symlinks to the present files and
# an index of them. The folder's own index lists all files, so that readers that need a missing one raise by name.
PART = ".part"


@dataclass(frozen=True)
class Pulled:
    """Result of a pull.

    Attributes:
        files: names of the files in the folder.
        omitted: names of the files that were left out.
        bytes: size of `files`.
        total_bytes: size of all files of the commit that a pull without a rank would fetch.
        fetched_bytes: bytes downloaded by this call.
    """

    path: Path
    commit: str
    files: tuple[str, ...]
    omitted: tuple[str, ...]
    bytes: int
    total_bytes: int
    fetched_bytes: int


def record_omitted(folder: Path, note: Mapping[str, Any]) -> None:
    """Writes `partial.json` with the names of the files that were left out."""
    write_durably(folder / f".{PARTIAL}", json.dumps(note, indent=2) + "\n")
    os.replace(folder / f".{PARTIAL}", folder / PARTIAL)


def link_part(folder: Path, files: Set[str]) -> None:
    """Creates the subfolder of Hugging Face files that one stage reads, or removes it if `files` is empty."""
    part = folder / PART
    if part.is_dir():
        shutil.rmtree(part)
    if not files:
        return
    part.mkdir()
    for name in files - {INDEX}:
        if "/" not in name:
            (part / name).symlink_to(Path("..", name))
    index = weight_map(folder / WAITING / INDEX)
    present = {weight: file for weight, file in index.items() if file in files}
    (part / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": present}), encoding="utf-8")


def put_in_place(folder: Path, last: str) -> None:
    """Turns the folder into a checkpoint by moving its manifest or index into place."""
    os.replace(folder / WAITING / last, folder / last)
    sync_directory(folder)
    shutil.rmtree(folder / WAITING)


def compute_sha256(path: Path) -> str:
    """Returns the sha256 digest by which the Hub identifies an LFS file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
