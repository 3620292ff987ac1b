"""Selection of the files of a folder that are pushed: weights in safetensors, complete, or nothing at all."""

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import ModelCard
from yaml import YAMLError

from ...checkpoint.manifest import MANIFEST, Manifest
from ...checkpoint.reader import PARTIAL, Checkpoint
from ...core.io.safe_paths import is_plain_name
from ...core.io.safetensors import read_header
from ...core.io.untrusted_json import read_weight_map
from ...errors import CheckpointError

INDEX = "model.safetensors.index.json"
CARD = "README.md"
# Training state that stock loops pickle next to the weights; loading a model does not need it.
SKIPPED = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer*.bin",
    "scheduler.pt",
    "scheduler*.bin",
    "scaler.pt",
    "rng_state*.pth",
    "random_states_*.pkl",
    "sampler*.bin",
    "*.tmp",
)
# Pickle formats, and formats that can contain pickles.
REFUSED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp", ".joblib", ".npy", ".npz")
# Weight files that a push of the same kind replaces: stale ones would be read together with the new ones.
_MERGED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_SHARDED = re.compile(r"(shard|random|data)-\d{5}(-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class Selection:
    """The files of one push.

    Attributes:
        sizes: bytes by name, relative to the folder.
        digests: blake3 hashes of the files that a manifest lists, by name.
        skipped: names of files that are not pushed.
        sharded: whether the folder is a sharded checkpoint.
    """

    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    skipped: tuple[str, ...]
    sharded: bool

    def stale(self, remote: Iterator[str]) -> list[str]:
        """Returns names in the repository that belong to an earlier push and would be read together with this one."""
        pattern = _SHARDED if self.sharded else _MERGED
        if not any(pattern.fullmatch(name) for name in self.sizes):
            return []
        return sorted(name for name in remote if pattern.fullmatch(name) and name not in self.sizes)


def select(folder: Path, ignore: tuple[str, ...] = ()) -> Selection:
    """Selects the files of a folder, a sharded checkpoint or Hugging Face files; nothing is sent yet.

    Not selected are hidden files and folders, names that match `SKIPPED` or, relative to the folder, `ignore`, and
    everything below a matching folder.

    Raises:
        CheckpointError: naming the file: a pickle, a link, a damaged safetensors file, an incomplete checkpoint or
            index, a path of this machine in the manifest's metadata; or there is nothing to send.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.")
    sharded = (folder / MANIFEST).is_file()
    digests = {name: entry.blake3 for name, entry in _complete(folder).files.items()} if sharded else {}
    sizes: dict[str, int] = {}
    skipped: list[str] = []
    for name, path in _files(folder, ignore, skipped):
        _check_file(path)
        sizes[name] = path.stat().st_size
    if not sizes:
        raise CheckpointError(f"{folder} has no files to push.")
    # A checkpoint that lacks one of its files would be unreadable.
    if lacking := sorted(digests.keys() - sizes.keys()):
        raise CheckpointError(
            f"{folder}: {', '.join(lacking)} are part of the checkpoint, but missing, hidden or ignored."
        )
    if INDEX in sizes:
        _check_index(folder, sizes)
    return Selection(sizes, digests, tuple(skipped), sharded)


def _files(folder: Path, ignore: tuple[str, ...], skipped: list[str]) -> Iterator[tuple[str, Path]]:
    for root, directories, files in os.walk(folder):
        directories.sort()
        for directory in list(directories):
            path = Path(root, directory)
            name = path.relative_to(folder).as_posix()
            if directory.startswith(".") or any(fnmatch(name, pattern) for pattern in ignore):
                directories.remove(directory)
            elif path.is_symlink():
                raise CheckpointError(f"{path} is a symbolic link; only regular files can be pushed.")
        for file in sorted(files):
            path = Path(root, file)
            name = path.relative_to(folder).as_posix()
            if file.startswith(".") or any(fnmatch(name, pattern) for pattern in ignore):
                continue
            if any(fnmatch(file, pattern) for pattern in SKIPPED):
                skipped.append(name)
            elif path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path} is not a regular file; only regular files can be pushed.")
            else:
                yield name, path


def _check_file(path: Path) -> None:
    if path.suffix == ".safetensors":
        read_header(path)
        return
    if path.suffix.lower() in REFUSED or _is_pickle(path):
        raise CheckpointError(
            f"{path} may contain a pickle, which runs code when it is loaded; only safetensors weights are pushed. "
            "Save the weights with save_pretrained, or move the file away."
        )


def _is_pickle(path: Path) -> bool:
    """Returns whether a file's content is a pickle, whatever its name: a bare one, or one in torch's zip archive."""
    with open(path, "rb") as file:
        start = file.read(4)
    if len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5:
        return True
    if start != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(PurePosixPath(name).suffix in (".pkl", ".npy") for name in archive.namelist())


def _complete(folder: Path) -> Manifest:
    checkpoint = Checkpoint(folder)
    if checkpoint.omitted:
        raise CheckpointError(
            f"{folder} was pulled for some ranks only ({PARTIAL}) and lacks {', '.join(sorted(checkpoint.omitted))}. "
            "Pull it without --ranks before pushing it."
        )
    for where, text in _texts(checkpoint.manifest.metadata, "facts"):
        if os.path.isabs(text):
            raise CheckpointError(
                f"{folder / MANIFEST}: {where} is {text!r}, a local path of the machine that wrote it; nothing is "
                "pushed."
            )
    return checkpoint.manifest


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, f"{where}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _texts(part, f"{where}[{index}]")


def weight_map(index: Path) -> dict[str, str]:
    """Reads weight -> file from an index; raises `CheckpointError` if unreadable or for a file outside its folder."""
    names = read_weight_map(index)
    for file in sorted(set(names.values())):
        if not is_plain_name(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {file!r}, which is not a safetensors file inside its folder.")
    return names


def _check_index(folder: Path, sizes: Mapping[str, int]) -> None:
    missing = sorted(set(weight_map(folder / INDEX).values()) - sizes.keys())
    if missing:
        raise CheckpointError(f"{folder / INDEX} names missing files: {', '.join(missing)}.")


def explained(error: BaseException) -> str:
    """Formats an error with its causes: the Hub client names the file in the outer error, the reason in the inner."""
    parts = []
    seen: BaseException | None = error
    while seen is not None:
        parts.append(f"{type(seen).__name__}: {' '.join(str(seen).split())}")
        seen = seen.__cause__
    return " <- ".join(dict.fromkeys(parts))


def check_card_metadata(path: Path) -> None:
    """Validates a card's metadata with the Hub before anything is uploaded; raises `CheckpointError` if invalid."""
    try:
        ModelCard.load(path).validate()
    except (TypeError, ValueError, YAMLError) as error:
        raise CheckpointError(f"{path}: invalid metadata: {explained(error)}") from error
