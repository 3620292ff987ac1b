"""Batches that depend on the rows of all data parallel ranks: drawn at random, or padded to the widest row.

One process draws for the rows of all ranks together, and pads them to each other. A rank that makes a batch of its own
rows alone draws what every other rank draws, for other rows, and pads to a width of its own. Where that shows, each
rank therefore reads and collates the batch of all ranks and takes its own rows of it; every other loader is left alone.
"""

import inspect
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers.trainer_utils import RemoveColumnsCollator

from ...losses.targets import mask_all_targets
from ...models.modalities.images import is_multimodal
from ...parallel_state import parallel_state
from ..accelerate.batch_shards import samples_on_all_ranks, shard_of

# Libraries whose collators do, with a mask, where they have no tokenizer that says otherwise.
_PAD_ON_THE_RIGHT = ("transformers", "trl")
# Rows of other widths than each other's they refuse.
_STACKS: tuple[Any, ...] = (default_collate, transformers.default_data_collator, transformers.DefaultDataCollator)


def pad_for_training(trainer: Any, loader: Any) -> None:
    """Has a rank train on rows that are padded as in one process, where the width of a batch is known to matter."""
    if trainer.args.include_num_input_tokens_seen == "all" or _padding_matters(trainer) or _joins_rows(loader):
        pad_for_evaluation(trainer, loader)


def _joins_rows(loader: Any) -> bool:
    """Tells whether a rank's batches are no rows, as padding-free and packed ones are not."""
    if not isinstance(loader, DataLoaderShard) or _shard_of(loader.base_dataloader) is None:
        return False
    # Of a single row nobody could tell.
    count = min(2, len(loader.base_dataloader.dataset))  # type: ignore[arg-type]
    return count > 1 and not _has_rows(first_batch(loader.base_dataloader, count), count)


def _padding_matters(trainer: Any) -> bool:
    """Tells whether a model's loss may depend on how wide a batch is, unless its rows are known to be padded well.

    That is on the right, with a mask that the model takes. Behind padding on the left a first token has a place and a
    prediction, and answers are sought in padding too.
    """
    collator, arguments = trainer.data_collator, inspect.signature(type(trainer.model).forward).parameters
    if "start_positions" in trainer.label_names or ("input_ids" in arguments and "attention_mask" not in arguments):
        return True
    if (tokenizer := getattr(collator, "tokenizer", None)) is not None:
        return tokenizer.padding_side == "left" or "attention_mask" not in tokenizer.model_input_names
    kind = collator if inspect.isfunction(collator) else type(collator)
    return str(kind.__module__).partition(".")[0] not in _PAD_ON_THE_RIGHT


def pad_for_evaluation(trainer: Any, loader: Any) -> None:
    """Has a rank read rows that are padded as in one process."""
    state = parallel_state(trainer.model)
    if state is not None and state.mesh.dp_size > 1 and isinstance(loader, DataLoaderShard):
        pad_for_all_ranks(loader.base_dataloader)


def pad_for_all_ranks(loader: DataLoader) -> None:
    """Has a rank's loader take its batches out of those of all ranks, unless its collator only stacks rows."""
    collator: Any = loader.collate_fn
    while isinstance(collator, RemoveColumnsCollator):
        collator = collator.data_collator
    shard = _shard_of(loader)
    if shard is not None and not any(kind in (collator, type(collator)) for kind in _STACKS):
        _take_local_samples(loader, shard)


def draw_for_all_ranks(loader: DataLoader) -> None:
    """Has a rank's loader take its batches out of those of all ranks, if making them draws random numbers."""
    shard = _shard_of(loader)
    if shard is not None and (type(shard) is _GlobalBatches or _draws(loader, shard.batch_size)):
        _take_local_samples(loader, shard)


def read_full_stream(loader: Any) -> None:
    """Has a rank's loader of a stream take its batches out of those of all ranks; each rank reads all rows anyway."""
    shard = loader.dataset
    if type(shard) not in (IterableDatasetShard, _FullStream) or shard.num_processes == 1 or loader.batch_size is None:
        return
    shard.__class__ = _FullStream
    loader.batch_sampler.batch_size = loader.batch_size * shard.num_processes
    # A loader that skips batches shares the stream.
    if not isinstance(loader.collate_fn, _OwnRows):
        loader.collate_fn = _CountedRows(loader.collate_fn, shard.process_index, loader.batch_size)


def _shard_of(loader: DataLoader) -> BatchSamplerShard | None:
    """Finds what deals batches of one size out to the ranks, behind samplers that skip some."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = shard_of(loader)
    if (
        type(sampler) not in (BatchSamplerShard, _GlobalBatches)
        or sampler.num_processes == 1
        or sampler.batch_size is None
    ):
        return None
    return sampler if sampler.even_batches or sampler.drop_last else None


def _take_local_samples(loader: DataLoader, shard: Any) -> None:
    shard.__class__ = _GlobalBatches
    # A loader that skips batches shares the sampler, and may have been made before or after.
    if not isinstance(loader.collate_fn, _OwnRows):
        size = samples_on_all_ranks(shard) // shard.num_processes
        loader.collate_fn = _OwnRows(loader.collate_fn, shard.process_index, size)


def _states() -> tuple[Any, bytes, bytes]:
    return random.getstate(), pickle.dumps(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()


def _draws(loader: DataLoader, rows: int) -> bool:
    """Makes one batch of the first rows, and puts the random states back."""
    # Of a single row nobody could tell whether rows are joined.
    count = min(max(rows, 2), len(loader.dataset))  # type: ignore[arg-type]
    with _same_states() as before:
        batch = _collated(loader, count)
        moved = _states() != before
    return moved and _has_rows(batch, count)


def first_batch(loader: DataLoader, rows: int) -> Any:
    """Makes a batch of a dataset's first rows, or of all if it has fewer; random states are as before."""
    with _same_states():
        return _collated(loader, min(rows, len(loader.dataset)))  # type: ignore[arg-type]


def _collated(loader: DataLoader, count: int) -> Any:
    collate: Any = loader.collate_fn
    return (collate.collate if isinstance(collate, _OwnRows) else collate)([loader.dataset[i] for i in range(count)])


@contextmanager
def _same_states() -> Iterator[tuple]:
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield _states()
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def _has_rows(batch: Any, count: int) -> bool:
    """Tells whether a batch is made of rows: every tensor `(rows, ...)`, which collators that join rows do not make.

    What stands in places of a text comes in numbers of its own.
    """
    if not isinstance(batch, Mapping):
        return False
    modalities = _modalities(batch)
    return all(
        _has_rows(value, count) and not _modalities(value)
        if isinstance(value, Mapping)
        else value.dim() > 0 and value.shape[0] == count
        for name, value in batch.items()
        if isinstance(value, Tensor | Mapping) and name not in modalities
    )


def _modalities(batch: Mapping) -> list[str]:
    """Lists the images, videos and sounds beside a text; without one they are rows, drawn and padded as such."""
    return [name for name in batch if is_multimodal(name)] if "input_ids" in batch else []


class _GlobalBatches(BatchSamplerShard):
    """Yields the rows of all ranks, without repetitions."""

    def __iter__(self) -> Iterator[list]:
        unsharded: list = []
        batches = 1 if self.split_batches else self.num_processes
        for number, batch in enumerate(self.batch_sampler, 1):
            unsharded += batch
            if number % batches == 0 and len(unsharded) == batches * self.batch_size:
                yield unsharded
                unsharded = []
        if unsharded and not self.drop_last:
            yield unsharded


class _OwnRows:
    """Collates the rows of all ranks and keeps those of one; what it lacks is taken from the beginning.

    Of collators that join rows it gets its own rows alone, or, where it has none, a row without targets.
    """

    def __init__(self, collate: Callable[[list], Any], rank: int, size: int):
        self.collate, self.rank, self.size = collate, rank, size

    def __call__(self, samples: list) -> Any:
        first = self.rank * self.size
        batch = self.collate(samples)
        if _has_rows(batch, len(samples)):
            places = [(first + index) % len(samples) for index in range(self.size)]
            modalities = _modalities(batch)
            own = self._collated_again([samples[place] for place in places]) if modalities else {}
            for name in modalities:
                del batch[name]
            batch = _taken(batch, places, len(samples))
            batch.update({name: own[name] for name in modalities if name in own})
            return batch
        # Once joined, repeated rows could not be told from others.
        own = samples[first : first + self.size]
        return self.collate(own) if own else mask_all_targets(self.collate(samples[:1]))

    def _collated_again(self, samples: list) -> Any:
        """Collates rows by themselves: which images belong to which rows the collator alone knows."""
        with _same_states():
            return self.collate(samples)


class _FullStream(IterableDatasetShard):
    """Yields the rows of all ranks, without repetitions; its length is that of a rank's."""

    def __iter__(self) -> Iterator[Any]:
        alone = IterableDatasetShard(self.dataset)
        alone.epoch = vars(self).get("epoch", 0)
        return iter(alone)


class CountedBatch(NamedTuple):
    """A batch of a rank, and how many rows that of all ranks has: at the end of a stream nothing else tells it."""

    batch: Any
    rows: int
    samples_per_rank: int


class _CountedRows(_OwnRows):
    def __call__(self, samples: list) -> CountedBatch:
        return CountedBatch(super().__call__(samples), len(samples), self.size)


def _taken(batch: Any, own: list[int], count: int) -> Any:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            batch[name] = _taken(value, own, count)
        elif isinstance(value, Tensor):
            batch[name] = value[own]
        elif isinstance(value, list | tuple) and len(value) == count:
            batch[name] = [value[place] for place in own]
    return batch
