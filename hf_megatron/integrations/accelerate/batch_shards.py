"""What Accelerate deals out of a batch to the data parallel ranks, and how many rows of the last one count."""

import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import BatchSampler

_COLLECTS, _ENDED = "_hf_megatron_collects", "_hf_megatron_ended"


def begin(original: Callable, self: Any) -> None:
    """Begins an iteration and notes how many rows the last batch of all ranks has, without repetitions.

    Stock's `remainder` is of the dataset's length, whatever a sampler takes of it, as in one process.
    """
    original(self)
    vars(self.gradient_state).pop(_ENDED, None)
    shard = None if data_parallel_group() is None else shard_of(self)
    if shard is None or shard.batch_size is None or type(shard.batch_sampler) is not BatchSampler:
        return
    sampler = shard.batch_sampler.sampler
    if shard.num_processes > 1 and isinstance(sampler, Sized):
        size = samples_on_all_ranks(shard)
        if shard.drop_last or not shard.even_batches:
            # No row is repeated, and ranks with batches of their own stop together at the shortest.
            self.remainder, self._hf_megatron_last = -1, (0, 1)
        else:
            self._hf_megatron_last = len(sampler) % size or size, size // shard.num_processes


def end(original: Callable, self: Any) -> None:
    """Ends an iteration; where Trainer is still collecting batches for a step, they stay batches of this loader.

    Of a stream it learns that there is none left by asking for one more.
    """
    if vars(self.gradient_state).get(_COLLECTS):
        vars(self.gradient_state)[_ENDED] = weakref.ref(self)
    original(self)


@contextmanager
def collecting(state: Any) -> Iterator[None]:
    """Has the loader stay known whose iteration ends while batches are collected, until another begins."""
    vars(state).pop(_ENDED, None)
    vars(state)[_COLLECTS] = True
    try:
        yield
    finally:
        del vars(state)[_COLLECTS]


def _loader(state: Any) -> Any:
    """Returns the loader of the batch under way."""
    ended = vars(state).get(_ENDED, lambda: None)()
    return state.active_dataloader if ended is None else ended


def read_ahead(state: Any, is_ahead: bool) -> None:
    """Says whether Trainer holds batches of the active loader that come before the one that it read last."""
    if (loader := _loader(state)) is not None:
        vars(loader)["_hf_megatron_ahead"] = is_ahead


def is_at_end(state: Any) -> bool:
    """Tells whether the batch under way is its loader's last."""
    loader = _loader(state)
    if loader is None or not loader.end_of_dataloader:
        return False
    # Trainer synchronizes with the last of the batches that it has read for a step.
    return state.sync_gradients or not vars(loader).get("_hf_megatron_ahead", False)


def last_batch_size(state: Any) -> int | None:
    """Counts the rows of the batch of all ranks under way, if it is its loader's last and rows of it are repeated.

    Args:
        state: the Accelerator's `gradient_state`.
    """
    replicas = 1 if (group := data_parallel_group()) is None else dist.get_world_size(group)
    return _last(state)[0] if is_filled_up(state, replicas) else None


def last_ranks(state: Any) -> int | None:
    """Counts the ranks that have some of these rows: the first ones."""
    rows, of_a_rank = _last(state)
    return -(-rows // of_a_rank) or None


def is_filled_up(state: Any, replicas: int) -> bool:
    """Tells whether the batch under way is its loader's last and has repeated rows, on so many ranks together."""
    if not is_at_end(state):
        return False
    noted = _noted(state)
    return _remainder(state) > 0 if noted is None else 0 < noted[0] < noted[1] * replicas


def cut_rows(state: Any) -> int | None:
    """Returns to how many rows one process cuts what it gathers of the batch under way, if it does.

    By the dataset's length, whatever a sampler takes of it; a stream's batches it reads and cuts to what they have.
    """
    if not is_at_end(state):
        return None
    if "_hf_megatron_last" in vars(_loader(state).base_dataloader):
        return last_batch_size(state)
    return _remainder(state) or None


def _remainder(state: Any) -> int:
    """Returns stock's number of rows of the last batch, which counts a dispatched one for each rank that shares it."""
    loader = _loader(state)
    found = 0 if loader is None else max(loader.remainder, 0)
    if not found or not isinstance(loader, DataLoaderDispatcher):
        return found
    replicas = 1 if (group := data_parallel_group()) is None else dist.get_world_size(group)
    return found * replicas // dist.get_world_size()


def _last(state: Any) -> tuple[int, int]:
    if not is_at_end(state):
        return 0, 1
    # Of what else deals out batches, such as streams that one rank reads, stock's own number is all that is known.
    return _noted(state) or (_remainder(state), 1)


def _noted(state: Any) -> tuple[int, int] | None:
    """Returns the rows of the batch of all ranks under way, and those that each of them has, where they were noted."""
    active = _loader(state)
    for loader in (active, active.base_dataloader):
        if (last := vars(loader).get("_hf_megatron_last")) is not None:
            return last[0], last[1]
    return None


def samples_on_all_ranks(shard: Any) -> int:
    """Counts the rows of a full batch of all ranks, of what deals whole batches out or splits them."""
    size: int = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    return size


def shard_of(loader: Any) -> Any:
    """Finds what deals the batches of a loader out to the ranks, behind samplers that skip some."""
    from accelerate.data_loader import BatchSamplerShard

    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        # Skipping samplers hold the one whose first batches they leave out.
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def sampler_of(loader: Any) -> Any:
    """Finds what says in which order a loader takes rows, behind what makes batches of them."""
    found = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)) is not None:
        found = inner
    return found


def batches_are_ours() -> bool:
    """Tells whether this library has set the Accelerator in use up."""
    from accelerate.state import AcceleratorState

    return type(AcceleratorState._shared_state.get("parallelism_config")).__name__ == "MegatronParallelismConfig"


def data_parallel_group() -> Any:
    """Returns the dp ranks of the Accelerator in use, if it is set up for more than one by this library."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    if not batches_are_ours() or state["parallelism_config"].dp_shard_size == 1:
        return None
    return state["device_mesh"]["dp_shard"].get_group()


def mesh_of_batches() -> Any:
    """Returns the mesh of the Accelerator in use, if this library has set it up so that ranks share batches."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    layout = state.get("parallelism_config")
    is_ours = type(layout).__name__ == "MegatronParallelismConfig" and layout.tp_size > 1
    return state["device_mesh"] if is_ours else None
