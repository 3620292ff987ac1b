"""Saves a sharded checkpoint as one folder that is complete or absent; shared by Trainer and Accelerate."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.communication.rank_errors import gather, rank_and_size
from .discovery import LATEST, fresh_name
from .tensor_chunks import LocalChunk
from .transaction import Transaction


def choose_target(path: Path, what: str) -> Path:
    """Returns `path`, or `path.1`, `path.2`, ... if it exists; the same on every rank.

    Args:
        what (`str`): the action, for error messages.
    """
    # The first rank's view of the file system counts.
    return gather(fresh_name(path), None, what)[0]


def save_sharded(
    target: Path,
    metadata: Mapping[str, Any],
    write_files: Callable[[Path], None],
    chunks: Callable[[], Iterable[LocalChunk]] | None,
    *,
    pointer: str | None = LATEST,
) -> None:
    """Writes a checkpoint into a temporary folder and renames it to `target` when all ranks have finished.

    Args:
        target (`Path`): must not exist; see `choose_target`.
        metadata: JSON data for the manifest, identical on all ranks.
        write_files (`Callable`): folder -> `None`; writes everything but tensors. Called on every rank.
        chunks (`Callable`, *optional*): returns the tensors that this rank writes; `None` if the files are all.
        pointer (`str`, *optional*): name of the file in the parent folder that names the newest checkpoint.

    Raises:
        CheckpointError: on every rank if one of them failed; no folder is left.
    """
    with (
        show_progress(f"Saving {target.name}") as on_step,
        Transaction(target, metadata, on_step=on_step, pointer=pointer) as transaction,
    ):
        write_files(transaction.directory)
        if chunks is not None:
            transaction.write(chunks())


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar on the first rank that counts the tensors it writes; none for saves of under a second."""
    from tqdm.auto import tqdm

    with tqdm(desc=what, unit=" tensors", delay=1.0, disable=rank_and_size(None)[0] > 0) as bar:
        yield lambda step: bar.update() if step.startswith("tensor ") else None
