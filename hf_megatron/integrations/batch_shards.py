"""What Accelerate deals out of a batch to the data parallel ranks, and how many rows of the last one count."""

from collections.abc import Callable, Sized
from typing import Any

from torch.utils.data import BatchSampler


def begin(original: Callable, self: Any) -> None:
    """Begins an iteration and says how many rows of the last batch of all ranks count.

    Stock takes it from the dataset's length, whatever a sampler takes of it, and forgets it for a loader that skips
    its first batches.
    """
    original(self)
    shard = None if data_parallel_group() is None else shard_of(self)
    if shard is None or shard.batch_size is None or type(shard.batch_sampler) is not BatchSampler:
        return
    sampler = shard.batch_sampler.sampler
    if shard.num_processes > 1 and isinstance(sampler, Sized):
        size = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        self.remainder = -1 if shard.drop_last else len(sampler) % size


def shard_of(loader: Any) -> Any:
    """Finds what deals the batches of a loader out to the ranks, behind samplers that skip some."""
    from accelerate.data_loader import BatchSamplerShard

    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while sampler is not None and not isinstance(sampler, BatchSamplerShard):
        # Skipping samplers hold the one whose first batches they leave out.
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def data_parallel_group() -> Any:
    """Returns the dp ranks of the Accelerator in use, if it is set up for more than one by this library."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    layout = state.get("parallelism_config")
    if type(layout).__name__ != "MegatronParallelismConfig" or layout.dp_shard_size == 1:
        return None
    return state["device_mesh"]["dp_shard"].get_group()
