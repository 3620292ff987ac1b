"""Manifest of a sharded checkpoint: its files with their digests, its tensors and the locations of their chunks.

A manifest is untrusted input. All of it is checked before any other file is opened.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors
import torch
import transformers

from ..compat.versions import __version__
from ..core.io.checksums import FileDigest
from ..core.io.safe_paths import inside
from ..core.io.safetensors import DTYPES
from ..core.io.untrusted_json import read_small
from ..errors import CheckpointError
from .tensor_chunks import TensorChunk, check_boxes

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

LARGEST_MANIFEST = 1 << 30
MOST_BOXES = 1 << 24
# Longest pattern of chunks that is written once with the number of its repetitions.
_PERIODS = 4

_DTYPE_OF_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class ChunkEntry:
    """Chunks of a tensor that a file's flat tensor `key` holds."""

    file: str
    key: str
    boxes: tuple[TensorChunk, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Global tensor and its chunks, which may overlap if ranks held copies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[ChunkEntry, ...]


def library_versions() -> dict[str, str]:
    return {
        "hf_megatron": __version__,
        "safetensors": safetensors.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest.

    Args:
        metadata (`Mapping[str, Any]`): the caller's own metadata, JSON values only.
        files (`Mapping[str, FileDigest]`): all files except the manifest, by path relative to the checkpoint.
        versions (`Mapping[str, str]`): versions of the libraries that wrote it.
    """

    world_size: int
    metadata: Mapping[str, Any]
    files: Mapping[str, FileDigest]
    tensors: Mapping[str, TensorEntry]
    versions: Mapping[str, str] = field(default_factory=library_versions)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "versions": dict(self.versions),
            "world_size": self.world_size,
            "facts": dict(self.metadata),
            "files": {name: {"size": entry.size, "blake3": entry.blake3} for name, entry in self.files.items()},
            "tensors": {
                name: {
                    "shape": list(entry.shape),
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "pieces": [
                        {"file": piece.file, "key": piece.key, "boxes": _encode_boxes(piece.boxes)}
                        for piece in entry.pieces
                    ],
                }
                for name, entry in self.tensors.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Any, where: str, size_of: Callable[[str], int | None] = lambda name: None) -> "Manifest":
        """Checks every field; `CheckpointError` contains the file `where`, the field and its value.

        Args:
            size_of (`Callable`): returns a file's size in bytes, or `None` if the file is not present.
        """
        check = _Checker(where)
        version = check.value(check.table(data, "content"), "format_version", int)
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{where}: format version {version} is not supported, expected {FORMAT_VERSION}.")
        files = {}
        for name, entry in check.value(data, "files", dict).items():
            check.file_name(name)
            size, digest = check.value(entry, "size", int), check.value(entry, "blake3", str)
            if size < 0 or not re.fullmatch("[0-9a-f]{64}", digest):
                raise CheckpointError(f"{where}: file {name!r} has invalid size {size} or invalid blake3 {digest!r}.")
            files[name] = FileDigest(size, digest)
            # A size in the manifest is only trusted if the file is not present.
            present = size_of(name)
            check.sizes[name] = size if present is None else min(size, present)
        tensors = {name: check.tensor(name, entry) for name, entry in check.value(data, "tensors", dict).items()}
        world_size, metadata = check.value(data, "world_size", int), check.value(data, "facts", dict)
        return cls(world_size, metadata, files, tensors, check.value(data, "versions", dict))

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Reads and checks the manifest of a checkpoint; `CheckpointError` if it is missing or invalid."""
        path = inside(directory, MANIFEST)
        try:
            content = read_small(path, LARGEST_MANIFEST)
            data = json.loads(content)
        except OSError as error:
            raise CheckpointError(f"{directory} is not a complete checkpoint: its {MANIFEST}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not JSON ({len(content)} bytes): {error}") from error
        manifest = cls.from_dict(data, str(path), lambda name: _size(inside(directory, name)))
        for name in manifest.files:
            inside(directory, name)
        return manifest


class _Checker:
    """Extracts values from a manifest, with the manifest's name in every error."""

    def __init__(self, where: str):
        self.where, self.boxes = where, 0
        self.sizes: dict[str, int] = {}

    def table(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {what} is {str(value)[:100]!r}, expected a JSON object.")
        return value

    def value(self, table: Any, key: str, kind: type) -> Any:
        value = self.table(table, f"the entry with {key!r}").get(key)
        # In Python, JSON's true is an int.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key!r} is {str(value)[:100]!r}, expected a {kind.__name__}.")
        return value

    def file_name(self, name: str) -> None:
        parts = PurePosixPath(name).parts
        plain = parts and ".." not in parts and not name.startswith("/") and "\\" not in name and "\0" not in name
        if not plain or os.path.isabs(name) or name == MANIFEST or name != "/".join(parts):
            raise CheckpointError(f"{self.where}: {name!r} is not the name of a file inside the checkpoint.")

    def integers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(number) is int and 0 <= number < 1 << 62 for number in value):
            raise CheckpointError(f"{self.where}: {what} is {str(value)[:100]!r}, expected a list of sizes.")
        return tuple(value)

    def tensor(self, name: str, entry: Any) -> TensorEntry:
        shape = self.integers(self.value(entry, "shape", list), f"{name}: shape")
        dtype = self.value(entry, "dtype", str)
        if dtype not in _DTYPE_OF_NAME:
            raise CheckpointError(f"{self.where}: {name} has the unknown dtype {dtype!r}.")
        pieces = []
        for piece in self.value(entry, "pieces", list):
            file, key = self.value(piece, "file", str), self.value(piece, "key", str)
            if file not in self.sizes:
                raise CheckpointError(
                    f"{self.where}: {name} is stored in {file!r}, which is not in the manifest's file list."
                )
            entries = self.sizes[file] // _DTYPE_OF_NAME[dtype].itemsize
            boxes = self.decode_boxes(self.value(piece, "boxes", list), name, file, 0 in shape, entries)
            check_boxes(f"{self.where}: {name}", shape, boxes)
            pieces.append(ChunkEntry(file, key, boxes))
        return TensorEntry(shape, _DTYPE_OF_NAME[dtype], tuple(pieces))

    def decode_boxes(
        self, runs: list[Any], name: str, file: str, is_empty: bool, entries: int
    ) -> tuple[TensorChunk, ...]:
        """Expands the chunks of a tensor in a file that has room for `entries` entries."""
        boxes: list[TensorChunk] = []
        for run in runs:
            repeat = self.value(run, "repeat", int) if "repeat" in self.table(run, f"{name}: a chunk") else 1
            corners = self.value(run, "offset", list), self.value(run, "shape", list)
            step = self.value(run, "step", list) if repeat != 1 else []
            steps = self.integers(step, f"{name}: step")
            pattern = [
                TensorChunk(self.integers(offset, f"{name}: offset"), self.integers(shape, f"{name}: shape"))
                for offset, shape in zip(*corners, strict=False)
            ]
            self.boxes += max(repeat, 1) * len(pattern)
            if self.boxes > MOST_BOXES or not pattern or len(corners[0]) != len(corners[1]):
                raise CheckpointError(
                    f"{self.where}: the chunks of {name} are invalid: no chunks, too many, or offsets and shapes "
                    "differ in number."
                )
            # Check before expanding: a run of a few bytes can encode any number of chunks.
            entries -= repeat * sum(box.numel for box in pattern)
            if entries < 0 or any(not box.numel for box in pattern) is not is_empty or (is_empty and repeat > 1):
                raise CheckpointError(
                    f"{self.where}: the chunks of {name} are empty, or exceed the size of {file!r}, {self.sizes[file]} "
                    "bytes."
                )
            if repeat == 1:
                boxes.extend(pattern)
            elif any(len(steps) != len(box.offset) for box in pattern):
                raise CheckpointError(
                    f"{self.where}: {name}: step {list(steps)} does not match the dims of its chunks."
                )
            else:
                boxes.extend(_shifted(box, steps, turn) for turn in range(repeat) for box in pattern)
        return tuple(boxes)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        # Removed concurrently.
        return None


def _shifted(box: TensorChunk, step: Sequence[int], times: int) -> TensorChunk:
    return TensorChunk(tuple(start + times * by for start, by in zip(box.offset, step, strict=True)), box.shape)


def _encode_boxes(boxes: Sequence[TensorChunk]) -> list[dict[str, Any]]:
    """Groups chunks into runs; thousands of interleaved intervals become one repeating run."""
    runs: list[dict[str, Any]] = []
    begin = 0
    while begin < len(boxes):
        best, repeat = 1, 1
        step: tuple[int, ...] = ()
        for period in range(1, _PERIODS + 1):
            count, by = _repeats(boxes, begin, period)
            if count > 1 and count * period > best * repeat:
                best, repeat, step = period, count, by
        pattern = boxes[begin : begin + best]
        run: dict[str, Any] = {name: [list(getattr(box, name)) for box in pattern] for name in ("offset", "shape")}
        runs.append(run if repeat == 1 else run | {"repeat": repeat, "step": list(step)})
        begin += best * repeat
    return runs


def _repeats(boxes: Sequence[TensorChunk], begin: int, period: int) -> tuple[int, tuple[int, ...]]:
    pattern = boxes[begin : begin + period]
    following = boxes[begin + period : begin + period + 1]
    step = tuple(b - a for a, b in zip(pattern[0].offset, following[0].offset, strict=True)) if following else ()
    if not following or min(step, default=0) < 0:
        return 1, ()
    available = (len(boxes) - begin) // period
    for count in range(1, available):
        turn = boxes[begin + count * period : begin + (count + 1) * period]
        if list(turn) != [_shifted(box, step, count) for box in pattern]:
            return count, step
    return max(available, 1), step
