"""Reads sharded checkpoints in any layout; everything is checked before the first entry is copied."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..core.communication.rank_errors import raise_on_all_ranks, rank_and_size
from ..core.io.checksums import hash_file
from ..core.io.safe_paths import inside
from ..core.io.safetensors import MappedSafetensors
from ..core.io.untrusted_json import LARGEST_JSON, read_small
from ..errors import CheckpointError
from .manifest import ChunkEntry, Manifest, TensorEntry
from .tensor_chunks import TensorChunk, check_boxes, copy_overlap, overlaps, uncovered

# Lists the files that `pull` omitted because no rank it pulled for needs them.
PARTIAL = "partial.json"


class Checkpoint:
    """Complete checkpoint, opened for reading by one rank; files are mapped when first needed.

    A checkpoint pulled for some ranks of a layout is complete for these: entries that are only in omitted files raise
    an error when checked or read.

    Attributes:
        omitted (`frozenset[str]`): files that were omitted deliberately.

    Raises:
        CheckpointError: the manifest is missing or invalid, files are missing, or a file's size differs from the
            manifest.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)
        self._shards: dict[str, MappedSafetensors] = {}
        left_out = read_partial(self.path)
        gone = [name for name in self.manifest.files if not (self.path / name).is_file()]
        self.omitted = left_out.intersection(gone)
        if missing := [name for name in gone if name not in left_out]:
            raise CheckpointError(f"{self.path}: {len(missing)} files are missing: {', '.join(missing)}.")
        present = ((name, entry.size) for name, entry in self.manifest.files.items() if name not in self.omitted)
        sizes = ((name, (self.path / name).stat().st_size, size) for name, size in present)
        wrong = [f"{name} has {actual} bytes instead of {size}" for name, actual, size in sizes if actual != size]
        if wrong:
            raise CheckpointError(f"{self.path}: {'; '.join(wrong)}.")

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata that the caller of the save passed."""
        return self.manifest.metadata

    def names(self) -> list[str]:
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def _tensor(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.")
        return entry

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Checks the digests of this rank's share of the files; for a partial checkpoint, of all present files.

        Raises:
            CheckpointError: digests differ; lists the files.
        """
        present = [item for item in self.manifest.files.items() if item[0] not in self.omitted]
        if self.omitted:
            # Other ranks may have different files, in a folder of their own.
            rank, ranks = 0, 1
        # Largest first, so that the shares have similar sizes.
        ordered = sorted(present, key=lambda item: (-item[1].size, item[0]))
        wrong = [name for name, entry in ordered[rank::ranks] if hash_file(self.path / name) != entry]
        if wrong:
            raise CheckpointError(f"{self.path}: the checksums of {', '.join(wrong)} do not match the manifest.")

    def compare(
        self, expected: Mapping[str, Sequence[int]] | Iterable[str], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Compares tensor names, and shapes if given, with the expected ones; returns missing and unexpected names.

        Raises:
            CheckpointError: names differ and `strict` is set, or a shape differs, strict or not.
        """
        expected_names = dict.fromkeys(expected)
        missing = sorted(expected_names.keys() - self.manifest.tensors.keys())
        unexpected = sorted(self.manifest.tensors.keys() - expected_names.keys())
        if strict and (missing or unexpected):
            raise CheckpointError(f"{self.path}: missing tensors: {missing}; unexpected tensors: {unexpected}.")
        if isinstance(expected, Mapping):
            differing = [
                f"{name} is {list(self.shape(name))}, expected {list(shape)}"
                for name, shape in expected.items()
                if name in self.manifest.tensors and self.shape(name) != tuple(shape)
            ]
            if differing:
                raise CheckpointError(f"{self.path}: shapes differ: {'; '.join(differing)}.")
        return missing, unexpected

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[TensorChunk]) -> None:
        """Raises `CheckpointError` unless `read` will succeed for a tensor of this global shape and dtype."""
        entry, where = self._tensor(name), f"{self.path}: {name}"
        if entry.shape != tuple(shape):
            raise CheckpointError(f"{where} is {list(entry.shape)}, expected {list(shape)}.")
        if entry.dtype != dtype:
            raise CheckpointError(f"{where} is {entry.dtype}, expected {dtype}: load the model with that dtype.")
        lacking = uncovered([piece.boxes for piece in self._present(entry)], boxes)
        if lacking:
            raise CheckpointError(
                f"{where}: {lacking} entries are missing from the checkpoint files{self._where(entry)}."
            )

    def _present(self, entry: TensorEntry) -> list[ChunkEntry]:
        return [piece for piece in entry.pieces if piece.file not in self.omitted]

    def _where(self, entry: TensorEntry) -> str:
        """Returns a note for errors that lists the omitted files with chunks of a tensor."""
        files = sorted({piece.file for piece in entry.pieces} & self.omitted)
        if not files:
            return ""
        return (
            f" here. This folder was pulled for other ranks or another layout ({PARTIAL}) without {', '.join(files)}; "
            "run `hf-megatron pull` for this layout"
        )

    def read(self, name: str, boxes: Sequence[TensorChunk], out: Tensor, cast: bool = False) -> None:
        """Fills `out`, `(entries of the boxes,)`, with the concatenated row-major contents of chunks of a tensor.

        Args:
            boxes: chunks of the global tensor.
            cast (`bool`, defaults to `False`): whether to convert other dtypes.

        Raises:
            CheckpointError: the dtype differs, chunks are outside the tensor, or entries are in no file; `out` is
                unchanged.
        """
        entry = self._tensor(name)
        where = f"{self.path}: {name}"
        check_boxes(where, entry.shape, boxes)
        if out.dim() != 1 or out.numel() != sum(box.numel for box in boxes):
            raise CheckpointError(f"{where}: {sum(box.numel for box in boxes)} entries do not fit {tuple(out.shape)}.")
        if out.dtype != entry.dtype and not cast:
            raise CheckpointError(f"{where} is {entry.dtype} and {out.dtype} was asked for; pass cast=True to convert.")
        # Copies from several ranks cover the same chunks; read any one of them.
        distinct = list({piece.boxes: piece for piece in self._present(entry)}.values())
        needed = [piece for piece in distinct if overlaps(piece.boxes, boxes)]
        lacking = uncovered([piece.boxes for piece in needed], boxes)
        if lacking:
            raise CheckpointError(
                f"{where}: {lacking} of {out.numel()} entries are missing from the checkpoint "
                f"files{self._where(entry)}."
            )
        # Open and check all files before copying from the first.
        sources = [(piece.boxes, self._contents(name, entry, piece)) for piece in needed]
        for source_boxes, data in sources:
            copy_overlap(source_boxes, data, boxes, out)

    def forget(self) -> None:
        """Frees the memory of everything read so far, for a reader that needs each tensor only once."""
        for shard in self._shards.values():
            shard.forget()

    def _contents(self, name: str, entry: TensorEntry, piece: ChunkEntry) -> Tensor:
        shard = self._shards.get(piece.file)
        if shard is None:
            shard = self._shards[piece.file] = MappedSafetensors(inside(self.path, piece.file))
        data = shard.tensor(piece.key)
        if data.dtype != entry.dtype or data.numel() != sum(box.numel for box in piece.boxes):
            raise CheckpointError(
                f"{shard.path}: {piece.key!r} has {data.numel()} entries of {data.dtype}, which does not match the "
                f"manifest entry of {name}."
            )
        return data


def read_partial(folder: Path) -> frozenset[str]:
    """Returns the files that `pull` omitted from a folder; raises `CheckpointError` if the list is unreadable."""
    path = folder / PARTIAL
    try:
        omitted = json.loads(read_small(path, LARGEST_JSON))["absent"]
        if not isinstance(omitted, list) or not all(isinstance(name, str) for name in omitted):
            raise ValueError(f"'absent' is {str(omitted)[:100]!r}, expected a list of names")
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error!r}; delete the folder and pull it again.") from error
    return frozenset(omitted)


def open_checkpoint(path: str | Path, group: ProcessGroup | None = None, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint and checks its files, divided among the ranks; errors are raised on all ranks. Collective."""
    checkpoint, error = None, None
    try:
        checkpoint = Checkpoint(path)
    except (CheckpointError, OSError) as caught:
        error = caught
    raise_on_all_ranks(error, group, f"Opening {path}")
    assert checkpoint is not None
    if verify:
        try:
            checkpoint.verify(*rank_and_size(group))
        except (CheckpointError, OSError) as caught:
            error = caught
        raise_on_all_ranks(error, group, f"Checking {path}")
    return checkpoint
