"""Atomic saves: a directory under its final name is complete, whenever any process is killed.

All files are written into `.tmp-<name>-<id>` next to the target. When all ranks are done, rank 0 writes the manifest,
makes it durable and renames the directory; only then is the file `latest` replaced. On file systems without atomic
rename the manifest marks completion instead: it is written last, and a directory without a valid manifest is
incomplete.
"""

import json
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ..core.communication.rank_errors import gather, gather_on_first, raise_on_all_ranks, rank_and_size
from ..core.io.atomic_folder import StagedFolder, remove_folder
from ..core.io.checksums import FileDigest, NewFile, hash_file
from ..core.io.safe_paths import sync_directory, write_durably
from ..core.io.safetensors import SafetensorsWriter, TensorMeta, widest_first
from ..errors import CheckpointError
from .discovery import LATEST, committed, pointed_at
from .manifest import MANIFEST, ChunkEntry, Manifest, TensorEntry
from .tensor_chunks import LocalChunk

# Files that users edit: a changed model card is not an error.
CARD_FILES = ("README.md", "loss.png")


class Transaction:
    """One save, entered by every rank; as a context manager it commits at the end and aborts on an exception.

    Outside a `with` statement every rank calls exactly one of `commit` and `abort`. A save removes leftovers of
    interrupted saves and conversions from the parent directory, but no folders that are still being written.

    Args:
        target (`str` or `Path`): the final directory of the checkpoint; must not exist.
        metadata (`Mapping[str, Any]`, *optional*): JSON values for the manifest; rank 0's are stored.
        group (`ProcessGroup`, *optional*): the ranks that save; by default the default group, or this process alone.
        on_step (`Callable[[str], None]`, *optional*): called at every I/O point with its name; for fault tests.
        pointer (`str`, *optional*, defaults to `"latest"`): file in the parent that will hold the target's name; not
            written if a checkpoint has that name itself.
        expected_bytes (`int`, defaults to 0): bytes that this rank will write, for a check of the free space.

    Attributes:
        directory (`Path`): folder in which each rank may create further files until `commit`.

    Raises:
        CheckpointError: on every rank, with the rank and the path, if any rank cannot save there.
    """

    def __init__(
        self,
        target: str | Path,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
        on_step: Callable[[str], None] | None = None,
        pointer: str | None = LATEST,
        expected_bytes: int = 0,
    ):
        self.target = Path(os.path.abspath(target))
        self.parent = self.target.parent
        self.metadata = dict(metadata or {})
        self.group = group
        self.pointer = pointer
        self.rank, self.size = rank_and_size(group)
        self.finished = False
        self._on_step = on_step or (lambda step: None)
        self._files: dict[str, FileDigest] = {}
        self._tensors: list[tuple[str, tuple[int, ...], TensorEntry]] = []
        self._doing = f"Saving {self.target}"

        proposals = gather((str(self.target), uuid.uuid4().hex), group, self._doing)
        if any(path != str(self.target) for path, _ in proposals):
            listing = ", ".join(f"rank {rank}: {path}" for rank, (path, _) in enumerate(proposals))
            self.finished = True
            raise CheckpointError(f"The ranks have different save directories: {listing}.")
        self._stage = StagedFolder(self.target, proposals[0][1])
        self.directory = self._stage.path
        self._together(self._prepare if self.rank == 0 else None)
        self._together(self._probe)
        self._check_space(expected_bytes)

    def _together(self, action: Callable[[], None] | None) -> None:
        """Runs `action` on this rank; if it fails on any rank, all ranks abort."""
        error: Exception | None = None
        try:
            if action is not None:
                action()
        except Exception as caught:  # noqa: BLE001 - all ranks must receive the error before it is raised
            error = caught
        self._agree(error)

    def _agree(self, error: BaseException | None) -> None:
        try:
            raise_on_all_ranks(error, self.group, self._doing)
        except CheckpointError:
            # Every rank has stopped writing. If contact was lost, one may still be writing; the next save removes its
            # leftovers.
            self.finished = True
            if self.rank == 0:
                self._stage.discard()
            raise

    def _prepare(self) -> None:
        try:
            json.dumps(self.metadata)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the metadata of {self.target} cannot be stored as JSON: {error}") from error
        self._stage.open(self._on_step)

    def _probe(self) -> None:
        probe = self.directory / f".probe-{self.rank}"
        probe.write_bytes(b"probe")
        probe.unlink()
        self._on_step("probe")

    def _check_space(self, expected: int) -> None:
        plans = gather((socket.gethostname(), expected), self.group, self._doing)
        needed = sum(other for name, other in plans if name == socket.gethostname())
        self._together(lambda: self._stage.require_space(needed))

    def write(self, pieces: Iterable[LocalChunk], file: str | None = None) -> None:
        """Writes this rank's chunks to one file, without copies except from devices.

        Args:
            pieces (`Iterable[LocalChunk]`): the chunks; each becomes a flat tensor of the file.
            file (`str`, *optional*): a file name unique to this rank; required from the second call on.

        Raises:
            CheckpointError: with the rank and the path; leave the `with` block, or call `abort`.
        """
        name = file or f"shard-{self.rank:05d}-of-{self.size:05d}.safetensors"
        if os.path.basename(name) != name or name in self._files or not name.endswith(".safetensors"):
            raise CheckpointError(f"{name!r} is not a new file name that ends in .safetensors.")
        tensors: dict[str, Tensor] = {}
        entries: list[tuple[str, tuple[int, ...], TensorEntry]] = []
        for piece in pieces:
            key = piece.name
            while key in tensors or key == "__metadata__":
                key += "+"
            tensors[key] = piece.data
            entry = ChunkEntry(name, key, piece.boxes)
            entries.append((piece.name, piece.shape, TensorEntry(piece.shape, piece.data.dtype, (entry,))))
        path = self.directory / name
        try:
            self._files[name] = self._write(path, tensors)
        except OSError as error:
            raise CheckpointError(f"writing {path}: {error}") from error
        self._tensors.extend(entries)

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
        planned = widest_first({key: TensorMeta.of(tensor) for key, tensor in tensors.items()})
        file = NewFile(path)
        try:
            self._on_step("open")
            writer = SafetensorsWriter(file, planned)
            self._on_step("header")
            for key in planned:
                writer.write(key, tensors[key])
                self._on_step(f"tensor {key}")
            file.close()
            self._on_step("fsync")
        finally:
            file.discard()
        return file.digest

    def commit(self) -> None:
        """Completes the checkpoint and renames it to its target, when all ranks have written their files.

        Raises:
            CheckpointError: the same on every rank, with the rank that failed; the temporary folder is removed.
        """
        self._together(lambda: self._on_step("commit"))
        parts = gather_on_first((self._files, self._tensors), self.group, self._doing)
        self._together((lambda: self._publish(parts)) if self.rank == 0 else None)
        self.finished = True

    def _publish(
        self, parts: list[tuple[dict[str, FileDigest], list[tuple[str, tuple[int, ...], TensorEntry]]]]
    ) -> None:
        files: dict[str, FileDigest] = {}
        tensors: dict[str, TensorEntry] = {}
        for rank, (written, entries) in enumerate(parts):
            if twice := sorted(files.keys() & written.keys()):
                raise CheckpointError(f"rank {rank} wrote {twice}, which another rank also wrote.")
            files |= written
            for name, shape, entry in entries:
                known = tensors.setdefault(name, TensorEntry(tuple(shape), entry.dtype, ()))
                if (known.shape, known.dtype) != (tuple(shape), entry.dtype):
                    raise CheckpointError(
                        f"{name} is {known.shape} {known.dtype} on one rank and {shape} {entry.dtype} on rank {rank}."
                    )
                tensors[name] = TensorEntry(known.shape, known.dtype, known.pieces + entry.pieces)
        files |= self._other_files(files)
        manifest = Manifest(self.size, self.metadata, dict(sorted(files.items())), dict(sorted(tensors.items())))
        text = json.dumps(manifest.to_dict(), separators=(",", ":"))
        # A checkpoint that cannot be read back, for example because of an invalid file name, must not be published.
        Manifest.from_dict(json.loads(text), str(self.target / MANIFEST))
        write_durably(self.directory / MANIFEST, text)
        self._on_step("manifest")
        sync_directory(self.directory)
        self._on_step("manifest durable")
        self._stage.publish(self._on_step)
        if self.pointer is not None:
            self._point()

    def _other_files(self, known: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
        """Fsyncs the files that callers put into the directory, and returns their sizes and digests."""
        digests = {}
        for path in sorted(self.directory.rglob("*")):
            name = path.relative_to(self.directory).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise CheckpointError(f"{path}: a checkpoint consists of plain files and directories.")
            if path.is_dir():
                sync_directory(path)
            elif name not in known:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                if name not in CARD_FILES:
                    digests[name] = hash_file(path)
        self._on_step("further files")
        return digests

    def _point(self) -> None:
        assert self.pointer is not None
        pointer = self.parent / self.pointer
        if pointer.is_dir():
            # A checkpoint has this name, perhaps this one; the newest is found without the file.
            return
        try:
            write_durably(pointer.with_name(f".{self.pointer}.new"), self.target.name + "\n")
            self._on_step("pointer written")
            os.replace(pointer.with_name(f".{self.pointer}.new"), pointer)
            self._on_step("pointer")
            sync_directory(self.parent)
            self._on_step("pointer durable")
        except OSError as error:
            raise CheckpointError(f"{self.target} is complete, but {pointer} could not be updated: {error}") from error

    def abort(self, error: BaseException | None = None) -> None:
        """Aborts on every rank and removes everything that was written.

        Args:
            error (`BaseException`, *optional*): the reason, for the other ranks.

        Raises:
            CheckpointError: on every rank, with the first rank that aborted.
        """
        self._agree(error or CheckpointError("the save was aborted"))

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished:
            return
        if error is None:
            self.commit()
        else:
            self.abort(error)


def prune(
    parent: str | Path,
    keep: int,
    pattern: str = "checkpoint-*",
    pointer: str = LATEST,
    protected: Iterable[Path] = (),
) -> list[Path]:
    """Deletes the oldest complete checkpoints; called by one rank, after a commit.

    Args:
        parent (`str` or `Path`): folder of the checkpoints.
        keep (`int`): number of checkpoints to keep, including the newest, the protected ones and the one in `pointer`.
        pattern (`str`, defaults to `"checkpoint-*"`): pattern of names that may be deleted.
        pointer (`str`, defaults to `"latest"`): file that holds the name of the newest checkpoint.
        protected (`Iterable[Path]`): checkpoints that are kept too, such as the best one.

    Returns:
        `list[Path]`: the deleted checkpoints, oldest first.

    Raises:
        CheckpointError: `keep` is below 1.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep}: expected 1 or more.")
    root = Path(parent)
    current = pointed_at(root, pointer)
    kept = {current, *map(Path, protected)}
    newest_first = [path for path in committed(root) if path.match(pattern) and not path.is_symlink()]
    room = max(1, keep - sum(path in kept for path in newest_first[keep:]))
    doomed = [path for path in reversed(newest_first[room:]) if path not in kept]
    for path in doomed:
        remove_folder(path)
    return doomed
