"""Order of shuffled Accelerate loops: a single process's, also when an interrupted epoch continues.

torch's samplers draw the order of an epoch, or a seed for it, from torch's generator. For several replicas, upstream
gives them a generator of their own when the loader is prepared, which is another order. Upstream also shares out the
batches of a `DistributedSampler` again, and most samples would never be read.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard, SkipBatchSampler
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from .batch_shards import batches_are_ours, find_sampler, list_samplers
from .plugin import is_ours, replicas
from .replicas import count_ranks


class SharedOrder(Sampler):
    """Order of a sampler without a generator, which the first rank draws.

    Attributes:
        order_start (`int` or `str`, *optional*): what the order of the epoch that is being read was drawn from: a seed,
            or the hexadecimal state of torch's generator.
        saved_start (*optional*): the same, of the epoch in which the loaded checkpoint was saved.
        continues (`bool`): whether the next iteration continues the saved epoch, because it skips batches.
    """

    order_start: int | str | None = None
    saved_start: int | str | None = None
    continues: bool = False

    def _agree(self, own: int | str) -> Any:
        """Returns what all ranks draw the order of an epoch from."""
        start: list[Any] = [own]
        if self.continues and self.saved_start is not None:
            start = [self.saved_start]
        elif dist.is_initialized():
            dist.broadcast_object_list(start, src=0)
        self.saved_start, self.order_start = None, start[0]
        return start[0]


class SharedRandomSampler(SharedOrder, RandomSampler):
    """A `RandomSampler` with the first rank's order; upstream draws a seed in each epoch."""

    def __iter__(self) -> Any:
        # Drawn in any case, as upstream does, so that torch's generator advances as in a single process.
        seed = self._agree(int(torch.empty((), dtype=torch.int64).random_().item()))
        generator = torch.Generator().manual_seed(seed)
        return iter(
            RandomSampler(
                self.data_source, replacement=self.replacement, num_samples=self._num_samples, generator=generator
            )
        )


class _DrawsDirectly(SharedOrder):
    """Mixin of samplers that draw their order from torch's generator."""

    def __iter__(self) -> Any:
        before = torch.get_rng_state()
        order = list(super().__iter__())  # type: ignore[misc]
        own = before.numpy().tobytes().hex()
        if (start := self._agree(own)) != own:
            after = torch.get_rng_state()
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(start), dtype=torch.uint8))
            order = list(super().__iter__())  # type: ignore[misc]
            torch.set_rng_state(after)
        return iter(order)


class SharedWeightedSampler(_DrawsDirectly, WeightedRandomSampler):
    """A `WeightedRandomSampler` with the first rank's order."""


class SharedSubsetSampler(_DrawsDirectly, SubsetRandomSampler):
    """A `SubsetRandomSampler` with the first rank's order."""


# Samplers of torch that draw from torch's generator, and what they become.
_SHARED: dict[type, type] = {
    RandomSampler: SharedRandomSampler,
    WeightedRandomSampler: SharedWeightedSampler,
    SubsetRandomSampler: SharedSubsetSampler,
}


def prepare_data_loader(original: Callable, self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares a data loader by the rank's place in the layout; a shuffled one keeps a single process's order."""
    if not is_ours(self):
        return original(self, data_loader, *args, **kwargs)
    sampler, random_state = find_sampler(data_loader), torch.get_rng_state()
    if type(sampler) is DistributedSampler and sampler.num_replicas == replicas(self):
        _yield_all_samples(sampler)
    generator = getattr(sampler, "generator", None)
    is_shuffled = type(sampler) in _SHARED and generator is None
    prepared = count_ranks(original, self, data_loader, *args, **kwargs)
    # Seedable samplers are replaced, and a dispatching loader iterates on the first rank only.
    if not isinstance(prepared, DataLoaderShard) or find_sampler(prepared) is not sampler:
        return prepared
    if generator is not None and prepared.synchronized_generator is None:
        # For one replica, upstream leaves the script's generators as they are, with the seed of each rank.
        prepared.synchronized_generator = generator
        prepared.rng_types = [*(prepared.rng_types or ()), "generator"]
    elif is_shuffled:
        # For several replicas, upstream has drawn a seed and set a generator.
        torch.set_rng_state(random_state)
        sampler.generator = None
        sampler.__class__ = _SHARED[type(sampler)]
        prepared.synchronized_generator = None
        prepared.rng_types = [kind for kind in prepared.rng_types or () if kind != "generator"]
    return prepared


def _yield_all_samples(sampler: DistributedSampler) -> None:
    """Makes a sampler yield the samples of all replicas, in a single process's order: batches are shared out later."""
    sampler.num_replicas, sampler.rank = 1, 0
    sampler.num_samples = sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]


def set_epoch(original: Callable, self: Any, epoch: int) -> None:
    """Passes the epoch to the samplers on all levels; upstream's search ends above one that skips and shards."""
    original(self, epoch)
    if batches_are_ours():
        for sampler in list_samplers(self):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def begin_order(loader: Any) -> None:
    """Continues the order of a saved epoch if the loader skips batches; called before each iteration."""
    sampler = find_sampler(loader)
    if isinstance(sampler, SharedOrder):
        sampler.continues = skips_batches(loader)


def skips_batches(loader: Any) -> bool:
    """Returns whether a data loader, or `None`, continues an epoch behind the batches that were read already."""
    if loader is None:
        return False
    return getattr(loader, "skip_batches", 0) > 0 or any(isinstance(o, SkipBatchSampler) for o in list_samplers(loader))


def end_order(original: Callable, self: Any) -> None:
    """Ends an iteration, and forgets the order of the epoch that was read."""
    if batches_are_ours() and isinstance(sampler := find_sampler(self), SharedOrder):
        sampler.order_start = None
    original(self)
