"""Collators that draw random numbers, such as the masks of masked language modelling, on data parallel ranks.

One process draws for the rows of all ranks together. A rank that draws for its own rows alone draws what every other
rank draws, for other rows. Where making a batch moves a random state, each rank therefore reads and collates the batch
of all ranks and takes its own rows of it; every other loader is left alone.
"""

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from .batch_shards import shard_of


def draw_for_all_ranks(loader: DataLoader) -> None:
    """Has a rank's loader make its batches out of those of all ranks, if making them draws random numbers."""
    shard = _shard_of(loader)
    if shard is None or not _draws(loader, shard.batch_size):
        return
    shard.__class__ = _WholeBatches
    loader.collate_fn = _OwnRows(loader.collate_fn, shard.process_index, shard.batch_size)


def _shard_of(loader: DataLoader) -> BatchSamplerShard | None:
    """Finds what deals whole batches of one size out to the ranks, behind samplers that skip some."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = shard_of(loader)
    if (
        type(sampler) is not BatchSamplerShard
        or sampler.num_processes == 1
        or sampler.split_batches
        or sampler.batch_size is None
    ):
        return None
    return sampler if sampler.even_batches or sampler.drop_last else None


def _states() -> tuple[Any, bytes, bytes]:
    return random.getstate(), pickle.dumps(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()


def _draws(loader: DataLoader, batch_size: int) -> bool:
    """Makes one batch of the first rows, and puts the random states back."""
    dataset: Any = loader.dataset
    count = min(batch_size, len(dataset))
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    before = _states()
    try:
        batch = loader.collate_fn([dataset[index] for index in range(count)])
        moved = _states() != before
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
    has_rows = isinstance(batch, Mapping) and all(
        value.dim() and value.shape[0] == count for value in batch.values() if isinstance(value, Tensor)
    )
    return moved and has_rows


class _WholeBatches(BatchSamplerShard):
    """Yields the rows of all ranks, without repetitions."""

    def __iter__(self) -> Iterator[list]:
        whole: list = []
        for number, batch in enumerate(self.batch_sampler, 1):
            whole += batch
            if number % self.num_processes == 0 and len(whole) == self.num_processes * self.batch_size:
                yield whole
                whole = []
        if whole and not self.drop_last:
            yield whole


class _OwnRows:
    """Collates the rows of all ranks and keeps those of one; what it lacks is taken from the beginning."""

    def __init__(self, collate: Callable[[list], Any], rank: int, batch_size: int):
        self.collate, self.rank, self.batch_size = collate, rank, batch_size

    def __call__(self, samples: list) -> Any:
        batch, start = self.collate(samples), self.rank * self.batch_size
        rows = torch.arange(start, start + self.batch_size) % len(samples)
        for name, value in batch.items():
            if isinstance(value, Tensor):
                batch[name] = value[rows]
        return batch
