"""Sharding of batches over data-parallel ranks in Accelerate, and the number of valid samples in the last batch."""

import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import BatchSampler

_COLLECTS, _ENDED = "_hf_megatron_collects", "_hf_megatron_ended"


def begin(original: Callable, self: Any) -> None:
    """Begins an iteration and records the size of the last global batch, without repeated samples.

    Upstream's `remainder` is based on the dataset length, regardless of how many samples the sampler takes.
    """
    original(self)
    vars(self.gradient_state).pop(_ENDED, None)
    shard = None if get_batch_group() is None else find_batch_shard(self)
    if shard is None or shard.batch_size is None or shard.num_processes == 1:
        return
    is_plain = type(shard.batch_sampler) is BatchSampler and isinstance(shard.batch_sampler.sampler, Sized)
    if shard.drop_last or (is_plain and not shard.even_batches):
        # No sample is repeated, and ranks with their own batches stop together at the shortest.
        self.remainder, self._hf_megatron_last = -1, (0, 1)
    elif is_plain:
        size = samples_on_all_ranks(shard)
        self._hf_megatron_last = len(shard.batch_sampler.sampler) % size or size, size // shard.num_processes


def end(original: Callable, self: Any) -> None:
    """Ends an iteration; while Trainer collects batches for a step, the ended loader stays known.

    For a stream, Trainer only learns that there are no more batches by requesting one.
    """
    if vars(self.gradient_state).get(_COLLECTS):
        vars(self.gradient_state)[_ENDED] = weakref.ref(self)
    original(self)


@contextmanager
def collecting(state: Any) -> Iterator[None]:
    """Keeps a loader that ends while batches are collected available, until another loader begins."""
    vars(state).pop(_ENDED, None)
    vars(state)[_COLLECTS] = True
    try:
        yield
    finally:
        del vars(state)[_COLLECTS]


def _loader(state: Any) -> Any:
    """Returns the loader of the current batch."""
    ended = vars(state).get(_ENDED, lambda: None)()
    return state.active_dataloader if ended is None else ended


def read_ahead(state: Any, is_ahead: bool) -> None:
    """Sets whether Trainer holds batches of the active loader that precede the last one it has read."""
    if (loader := _loader(state)) is not None:
        vars(loader)["_hf_megatron_ahead"] = is_ahead


def is_at_end(state: Any) -> bool:
    """Returns whether the current batch is its loader's last one."""
    loader = _loader(state)
    if loader is None or not loader.end_of_dataloader:
        return False
    # Trainer synchronizes gradients with the last of the batches that it has read for a step.
    return state.sync_gradients or not vars(loader).get("_hf_megatron_ahead", False)


def last_batch_size(state: Any) -> int | None:
    """Returns the size of the current global batch if it is its loader's last and has repeated samples; else `None`.

    Args:
        state: the Accelerator's `gradient_state`.
    """
    replicas = 1 if (group := get_batch_group()) is None else dist.get_world_size(group)
    return _last(state)[0] if is_filled_up(state, replicas) else None


def last_ranks(state: Any) -> int | None:
    """Returns how many ranks, from the first, have valid samples in the last batch; `None` if it is not the last."""
    rows, of_a_rank = _last(state)
    return -(-rows // of_a_rank) or None


def is_filled_up(state: Any, replicas: int) -> bool:
    """Returns whether the current batch is its loader's last one and has repeated samples, over `replicas` ranks."""
    if not is_at_end(state):
        return False
    batch_sizes = _noted(state)
    return _remainder(state) > 0 if batch_sizes is None else 0 < batch_sizes[0] < batch_sizes[1] * replicas


def cut_rows(state: Any) -> int | None:
    """Returns the size to which a single process would truncate its gathered batch, `None` if it would not.

    The size follows from the dataset length, whatever the sampler takes. For loaders without a record, such as
    dispatched streams, it is Accelerate's own remainder.
    """
    if not is_at_end(state):
        return None
    if "_hf_megatron_last" in vars(_loader(state).base_dataloader):
        return last_batch_size(state)
    return _remainder(state) or None


def _remainder(state: Any) -> int:
    """Returns Accelerate's remainder, converted from ranks to replicas for dispatched batches."""
    loader = _loader(state)
    remainder = 0 if loader is None else max(loader.remainder, 0)
    if not remainder or not isinstance(loader, DataLoaderDispatcher):
        return remainder
    replicas = 1 if (group := get_batch_group()) is None else dist.get_world_size(group)
    return remainder * replicas // dist.get_world_size()


def _last(state: Any) -> tuple[int, int]:
    if not is_at_end(state):
        return 0, 1
    # For other samplers, such as dispatched streams, fall back to Accelerate's own count.
    return _noted(state) or (_remainder(state), 1)


def _noted(state: Any) -> tuple[int, int] | None:
    """Returns the recorded sizes of the last global batch and of a local batch, if any."""
    active = _loader(state)
    for loader in (active, active.base_dataloader):
        if (last := vars(loader).get("_hf_megatron_last")) is not None:
            return last[0], last[1]
    return None


def samples_on_all_ranks(shard: Any) -> int:
    """Returns the size of a full global batch, whether the sampler distributes batches or splits them."""
    size: int = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    return size


def find_batch_shard(loader: Any) -> Any:
    """Returns the sampler that shards a loader's batches over the ranks, looking through skipping samplers."""
    from accelerate.data_loader import BatchSamplerShard

    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        # Samplers that skip batches wrap the original batch sampler.
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def find_sampler(loader: Any) -> Any:
    """Returns the sampler that determines a loader's sample order, looking through batch samplers."""
    return list_samplers(loader)[-1]


def list_samplers(loader: Any) -> list[Any]:
    """Returns a loader's sampler and those inside it, the outermost first."""
    samplers = [loader.batch_sampler if loader.batch_sampler is not None else loader.sampler]
    while (inner := getattr(samplers[-1], "batch_sampler", None) or getattr(samplers[-1], "sampler", None)) is not None:
        samplers.append(inner)
    return samplers


def batches_are_ours() -> bool:
    """Returns whether this library has set up the Accelerator in use."""
    from accelerate.state import AcceleratorState

    return type(AcceleratorState._shared_state.get("parallelism_config")).__name__ == "MegatronParallelismConfig"


def get_batch_group() -> Any:
    """Returns the data-parallel group of the Accelerator in use, if this library set it up with more than one rank."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    if not batches_are_ours() or state["parallelism_config"].dp_shard_size == 1:
        return None
    return state["device_mesh"]["dp_shard"].get_group()


def get_batch_mesh() -> Any:
    """Returns the mesh of the Accelerator in use, if this library set it up for ranks that share batches."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    layout = state.get("parallelism_config")
    is_ours = type(layout).__name__ == "MegatronParallelismConfig" and layout.tp_size > 1
    return state["device_mesh"] if is_ours else None
