"""Asynchronous saving: training continues while a copy of the state is written and committed."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from .discovery import LATEST
from .tensor_chunks import LocalChunk
from .transaction import Transaction

# Alignment in bytes of each tensor in the snapshot.
_ALIGNMENT = 64


class AsyncSaver:
    """Copies a snapshot to CPU memory and saves it in a thread; one save at a time.

    All methods are collective. Errors of the background save are raised by the next `save`, `wait` or `close`, on all
    ranks. A process that is killed discards the save in progress; one that exits normally finishes it.

    Args:
        group (`ProcessGroup`, *optional*): a gloo group of all ranks, created collectively for this saver only, so
            that its collectives never mix with training's; `None` for a single process.
    """

    def __init__(self, group: ProcessGroup | None = None):
        self.group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def save(
        self,
        pieces: Iterable[LocalChunk],
        target: str | Path,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        on_step: Callable[[str], None] | None = None,
        pointer: str | None = LATEST,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Waits for the previous save, copies the chunks, and returns while they are being written.

        Args:
            pieces (`Iterable[LocalChunk]`): this rank's chunks; their data may change as soon as this returns.
            target, metadata, on_step, pointer: as for `Transaction`.
            files (`Mapping[str, bytes]`, *optional*): auxiliary files of this rank, by their paths in the folder.
            after (`Callable[[], None]`, *optional*): called in the background once the checkpoint is complete.

        Raises:
            CheckpointError: the previous save failed; no new save is started.
        """
        self.wait()
        snapshot: list[LocalChunk] = []
        failure: Exception | None = None
        try:
            snapshot = self._snapshot(list(pieces))
        except Exception as error:  # noqa: BLE001 - the transaction propagates it to the other ranks
            failure = error

        def run() -> None:
            needed = sum(piece.data.numel() * piece.data.element_size() for piece in snapshot)
            with Transaction(target, metadata, self.group, on_step, pointer, needed) as transaction:
                if failure is not None:
                    raise failure
                for name, content in (files or {}).items():
                    file = transaction.directory / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
                transaction.write(snapshot)
            if after is not None:
                after()

        self._running = self._thread.submit(run)

    def _snapshot(self, pieces: list[LocalChunk]) -> list[LocalChunk]:
        """Copies into a buffer that is reused by the next save; mapping new pages would cost as much as the copies."""
        offsets, size = [], 0
        for piece in pieces:
            offsets.append(size)
            size += -(-piece.data.numel() * piece.data.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self._memory.numel() < size:
            # Free the old buffer first, so that both do not exist at the same time.
            self._memory = torch.empty(0, dtype=torch.uint8)
            on_device = any(piece.data.device.type == "cuda" for piece in pieces)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_device)
        copies = []
        for piece, offset in zip(pieces, offsets, strict=True):
            end = offset + piece.data.numel() * piece.data.element_size()
            data = self._memory[offset:end].view(piece.data.dtype)
            data.copy_(piece.data.detach(), non_blocking=True)
            copies.append(LocalChunk(piece.name, piece.shape, piece.boxes, data))
        for device in {piece.data.device for piece in pieces if piece.data.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return copies

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def wait(self) -> None:
        """Waits for the save in progress; raises `CheckpointError` on every rank if it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits for the save in progress, ends the thread and frees the buffer."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._memory = torch.empty(0, dtype=torch.uint8)
