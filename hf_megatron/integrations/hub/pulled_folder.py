"""The folder that a pull fills: what makes it a checkpoint comes last, and what it lacks on purpose is noted."""

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

# Where the file that makes a folder a checkpoint waits until the others are there.
WAITING = ".pull"
# What `from_pretrained` reads of a partial folder of Hugging Face files: links to those that are there, and an index of
# them. The folder's own index names all, so that whoever needs one that is not there is told so.
PART = ".part"


@dataclass(frozen=True)
class Pulled:
    """What a pull did.

    Attributes:
        files: names that are in the folder now.
        absent: names that were left out.
        bytes: of `files`.
        total_bytes: of all files of the commit that a pull without a rank would fetch.
        fetched_bytes: what came over the network this time.
    """

    path: Path
    commit: str
    files: tuple[str, ...]
    off_stage: tuple[str, ...]
    bytes: int
    total_bytes: int
    fetched_bytes: int


def record_off_stage(folder: Path, note: Mapping[str, Any]) -> None:
    """Writes the note that says which files were left out, under `off_stage`."""
    write_durably(folder / f".{PARTIAL}", json.dumps(note, indent=2) + "\n")
    os.replace(folder / f".{PARTIAL}", folder / PARTIAL)


def link_part(folder: Path, files: Set[str]) -> None:
    """Makes the part of a folder of Hugging Face files that one stage reads; without files there is none."""
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
    """Makes the folder a checkpoint: its manifest or index stops waiting."""
    os.replace(folder / WAITING / last, folder / last)
    sync_directory(folder)
    shutil.rmtree(folder / WAITING)


def sha256_of(path: Path) -> str:
    """Returns the digest that the Hub knows an LFS file by."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
