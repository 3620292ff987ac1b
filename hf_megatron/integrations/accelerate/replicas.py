"""Data-parallel replicas as the processes of a job, for the numbers by which scripts distribute data.

`num_processes`, `world_size` and `process_index` count replicas, because the ranks of a replica read the same batches.
What must happen on one rank of the job (files, logs, trackers) or once per rank (traces) keeps counting ranks.

This module is imported while Accelerate itself is, so it must not import Accelerate or transformers at the top.
"""

import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...core.communication.call_stack import is_called_by_user
from ...core.runtime import RUNTIME
from .plugin import get_latest_layout, is_ours, ranks_of_replica, replicas

if TYPE_CHECKING:
    from ...parallel_state import ParallelState

_COUNTS_RANKS: ContextVar[bool] = ContextVar("whether upstream code that counts ranks is running", default=False)
_READS: ContextVar[list[str] | None] = ContextVar("reads of the number of replicas by a script", default=None)


@contextmanager
def _counting_ranks() -> Iterator[None]:
    token = _COUNTS_RANKS.set(True)
    try:
        yield
    finally:
        _COUNTS_RANKS.reset(token)


@contextmanager
def watch_reads() -> Iterator[Sized]:
    """Yields a list of the script's own reads of the number of replicas inside."""
    reads: list[str] = []
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)


def _record_read(name: str) -> None:
    reads = _READS.get()
    if reads is not None and is_called_by_user(("hf_megatron",)):
        reads.append(name)


def count_ranks(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an upstream function that depends on the rank itself, not on the replica."""
    with _counting_ranks():
        return original(self, *args, **kwargs)


def _ranks_per_replica() -> int:
    """Returns the ranks per replica of the Accelerator in use, else of the last model, else of the launched layout."""
    from accelerate.state import AcceleratorState

    from .batch_shards import batches_are_ours

    if _COUNTS_RANKS.get():
        return 1
    if batches_are_ours():
        ranks: int = AcceleratorState._shared_state["parallelism_config"].tp_size
        return ranks
    layout = get_latest_layout()
    if layout is None and RUNTIME.launch is not None:
        layout = RUNTIME.launch.layout
    return 1 if layout is None else layout.ranks_per_replica


def num_processes(original: Callable, self: Any) -> int:
    """Returns the number of replicas of an Accelerator."""
    _record_read("num_processes")
    return replicas(self) if is_ours(self) and not _COUNTS_RANKS.get() else original(self)


def process_index(original: Callable, self: Any) -> int:
    """Returns the replica of this rank; the ranks of a replica are neighbors."""
    ranks = ranks_of_replica(self) if is_ours(self) and not _COUNTS_RANKS.get() else 1
    return original(self) // ranks


def is_last_process(original: Callable, self: Any) -> bool:
    """Returns whether this is the last rank of the job."""
    return self.state.is_last_process if is_ours(self) else original(self)


@contextmanager
def profile(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Profiles a block; each rank writes a trace of its own at the end."""
    with ExitStack() as stack:
        yield stack.enter_context(original(self, *args, **kwargs))
        # The trace is written here, and named by the process index.
        with _counting_ranks():
            stack.close()


class _ReplicaState:
    """Accelerate's state, with the replica in place of the rank."""

    def __init__(self, state: Any):
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def process_index(self) -> int:
        """The replica of this rank."""
        return self._state.process_index // _ranks_per_replica()


def seed_state(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Returns the state from which `set_seed(device_specific=True)` derives its seed: one seed per replica."""
    from .batch_shards import batches_are_ours

    state = original(*args, **kwargs)
    return _ReplicaState(state) if batches_are_ours() else state


def world_size(original: Callable, self: Any) -> int:
    """Returns the number of replicas, in `TrainingArguments` whose ranks have joined the job."""
    _record_read("world_size")
    ranks: int = original(self)
    return ranks if ranks == 1 else ranks // _ranks_per_replica()


def training_process_index(original: Callable, self: Any) -> int:
    """Returns the replica of this rank, in `TrainingArguments`."""
    rank: int = original(self)
    return rank if rank == 0 else rank // _ranks_per_replica()


@contextmanager
def main_process_first(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Runs a block on the first rank before the others, also if all of them form one replica."""
    with ExitStack() as stack:
        with _counting_ranks():
            stack.enter_context(original(self, *args, **kwargs))
        yield


def announce_replicas(state: "ParallelState") -> None:
    """Prints once per layout, on the first rank, which numbers count replicas and which count ranks."""
    mesh, layout = state.mesh, state.config
    if layout.ranks_per_replica == 1 or mesh.is_announced:
        return
    mesh.is_announced = True
    if dist.get_rank() == 0 and dist.get_backend() != "fake":
        count = f"{mesh.dp_size} replica{'s' if mesh.dp_size > 1 else ''} of {layout.ranks_per_replica} ranks"
        print(
            f"hf_megatron: {count} ({layout.layout()}). num_processes, world_size and process_index of Accelerate and "
            "Trainer count replicas; WORLD_SIZE, RANK and torch.distributed count ranks, and collectives of a script "
            "need group=hf_megatron.data_parallel_group().",
            file=sys.stderr,
            flush=True,
        )
