"""Collation of global batches, for batches that depend on the samples of all data-parallel ranks.

A single process draws random numbers for all samples together and pads them to the longest. A rank that collates its
local samples alone draws the same numbers as every other rank, for different samples, and pads to a width of its own.
Where that affects results, each rank reads and collates the global batch and keeps its local samples; all other loaders
are left alone.
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
from ..accelerate.batch_shards import find_batch_shard, samples_on_all_ranks

# Libraries whose collators pad on the right, with a mask, unless a tokenizer specifies otherwise.
_PAD_ON_THE_RIGHT = ("transformers", "trl")
# These collators reject samples of unequal width, so they never pad.
_STACKS: tuple[Any, ...] = (default_collate, transformers.default_data_collator, transformers.DefaultDataCollator)


def pad_for_training(trainer: Any, loader: Any) -> None:
    """Collates global batches for training if the padded width is known to affect results."""
    if trainer.args.include_num_input_tokens_seen == "all" or _padding_matters(trainer) or _joins_rows(loader):
        pad_for_evaluation(trainer, loader)


def _joins_rows(loader: Any) -> bool:
    """Returns whether batches are not made of separate samples, as with padding-free and packing collators."""
    if not isinstance(loader, DataLoaderShard) or _get_uniform_shard(loader.base_dataloader) is None:
        return False
    # A single sample cannot show the difference.
    count = min(2, len(loader.base_dataloader.dataset))  # type: ignore[arg-type]
    return count > 1 and not _has_rows(first_batch(loader.base_dataloader, count), count)


def _padding_matters(trainer: Any) -> bool:
    """Returns whether a model's loss may depend on the padded width; False only if padding is known to be harmless.

    Padding is harmless on the right, with an attention mask that the model takes. With left padding the first token has
    a different position and contributes a prediction, and span extraction also searches the padding.
    """
    collator, arguments = trainer.data_collator, inspect.signature(type(trainer.model).forward).parameters
    if "start_positions" in trainer.label_names or ("input_ids" in arguments and "attention_mask" not in arguments):
        return True
    if (tokenizer := getattr(collator, "tokenizer", None)) is not None:
        return tokenizer.padding_side == "left" or "attention_mask" not in tokenizer.model_input_names
    kind = collator if inspect.isfunction(collator) else type(collator)
    return str(kind.__module__).partition(".")[0] not in _PAD_ON_THE_RIGHT


def pad_for_evaluation(trainer: Any, loader: Any) -> None:
    """Collates global batches for evaluation."""
    state = parallel_state(trainer.model)
    if state is not None and state.mesh.dp_size > 1 and isinstance(loader, DataLoaderShard):
        pad_for_all_ranks(loader.base_dataloader)


def pad_for_all_ranks(loader: DataLoader) -> None:
    """Replaces a loader's local batches by slices of global batches, unless the collator only stacks samples."""
    collator: Any = loader.collate_fn
    while isinstance(collator, RemoveColumnsCollator):
        collator = collator.data_collator
    shard = _get_uniform_shard(loader)
    if shard is not None and not any(kind in (collator, type(collator)) for kind in _STACKS):
        _take_local_samples(loader, shard)


def draw_for_all_ranks(loader: DataLoader) -> None:
    """Replaces a loader's local batches by slices of global batches if the collator draws random numbers."""
    shard = _get_uniform_shard(loader)
    if shard is not None and (type(shard) is _GlobalBatches or _draws(loader, shard.batch_size)):
        _take_local_samples(loader, shard)


def read_full_stream(loader: Any) -> None:
    """Replaces a stream loader's local batches by slices of global batches; every rank reads all samples anyway."""
    shard = loader.dataset
    if type(shard) not in (IterableDatasetShard, _FullStream) or shard.num_processes == 1 or loader.batch_size is None:
        return
    shard.__class__ = _FullStream
    loader.batch_sampler.batch_size = loader.batch_size * shard.num_processes
    # A loader that skips batches shares the stream.
    if not isinstance(loader.collate_fn, _OwnRows):
        loader.collate_fn = _CountedRows(loader.collate_fn, shard.process_index, loader.batch_size)


def _get_uniform_shard(loader: DataLoader) -> BatchSamplerShard | None:
    """Returns the sampler that shards batches of one size over the ranks, looking through skipping samplers."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = find_batch_shard(loader)
    if (
        type(sampler) not in (BatchSamplerShard, _GlobalBatches)
        or sampler.num_processes == 1
        or sampler.batch_size is None
    ):
        return None
    return sampler if sampler.even_batches or sampler.drop_last else None


def _take_local_samples(loader: DataLoader, shard: Any) -> None:
    shard.__class__ = _GlobalBatches
    # A loader that skips batches shares the sampler, and may have been created before or after.
    if not isinstance(loader.collate_fn, _OwnRows):
        size = samples_on_all_ranks(shard) // shard.num_processes
        loader.collate_fn = _OwnRows(loader.collate_fn, shard.process_index, size)


def _states() -> tuple[Any, bytes, bytes]:
    return random.getstate(), pickle.dumps(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes()


def _draws(loader: DataLoader, rows: int) -> bool:
    """Returns whether collating the first samples changes a random state; the states are restored."""
    # A single sample cannot show whether samples are concatenated.
    count = min(max(rows, 2), len(loader.dataset))  # type: ignore[arg-type]
    with _same_states() as before:
        batch = _collated(loader, count)
        moved = _states() != before
    return moved and _has_rows(batch, count)


def first_batch(loader: DataLoader, rows: int) -> Any:
    """Collates the first `rows` samples of a dataset, or all if it has fewer; random states are restored."""
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
    """Returns whether a batch is made of separate samples: every tensor is `(batch, ...)`.

    Collators that concatenate samples return other shapes. Modality inputs with a placeholder in the text have their
    own batch dim and are ignored.
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
    """Returns the names of image, video and audio inputs that accompany a text.

    Without a text these inputs are the samples, collated like any other tensor.
    """
    return [name for name in batch if is_multimodal(name)] if "input_ids" in batch else []


class _GlobalBatches(BatchSamplerShard):
    """Yields the global batches, without repeated samples."""

    def __iter__(self) -> Iterator[list]:
        global_batch: list = []
        batches = 1 if self.split_batches else self.num_processes
        for number, batch in enumerate(self.batch_sampler, 1):
            global_batch += batch
            if number % batches == 0 and len(global_batch) == batches * self.batch_size:
                yield global_batch
                global_batch = []
        if global_batch and not self.drop_last:
            yield global_batch


class _OwnRows:
    """Collates the global batch and keeps this rank's samples; missing ones are repeated from the beginning.

    Collators that concatenate samples get this rank's samples only or, if it has none, one sample with masked targets.
    """

    def __init__(self, collate: Callable[[list], Any], rank: int, size: int):
        self.collate, self.rank, self.size = collate, rank, size

    def __call__(self, samples: list) -> Any:
        first = self.rank * self.size
        batch = self.collate(samples)
        if _has_rows(batch, len(samples)):
            places = [(first + index) % len(samples) for index in range(self.size)]
            modalities = _modalities(batch)
            local_samples = self._collated_again([samples[place] for place in places]) if modalities else {}
            for name in modalities:
                del batch[name]
            batch = _taken(batch, places, len(samples))
            batch.update({name: local_samples[name] for name in modalities if name in local_samples})
            return batch
        # After concatenation, repeated samples could not be distinguished from others.
        local_samples = samples[first : first + self.size]
        if local_samples:
            return self.collate(local_samples)
        return mask_all_targets(self.collate(samples[:1])) if isinstance(batch, Mapping) else self.fill_up(samples)

    def fill_up(self, samples: list) -> Any:
        """Returns a batch without names for a rank without samples: repeated ones, as from Accelerate."""
        first = self.rank * self.size
        return self.collate([samples[(first + index) % len(samples)] for index in range(self.size)])

    def _collated_again(self, samples: list) -> Any:
        """Collates samples separately: only the collator knows which images belong to which samples."""
        with _same_states():
            return self.collate(samples)


class _FullStream(IterableDatasetShard):
    """Yields the samples of all ranks, without repetitions; its length is the per-rank length."""

    def __iter__(self) -> Iterator[Any]:
        alone = IterableDatasetShard(self.dataset)
        alone.epoch = vars(self).get("epoch", 0)
        return iter(alone)


class CountedBatch(NamedTuple):
    """A local batch with the size of the global batch, which is otherwise unknown at the end of a stream.

    The batch is `None` if the rank has no samples.
    """

    batch: Any
    rows: int
    samples_per_rank: int


class _CountedRows(_OwnRows):
    def fill_up(self, samples: list) -> Any:
        """Returns `None`: the loader ends on all ranks where one has no samples whose targets can be masked."""
        return None

    def __call__(self, samples: list) -> CountedBatch:
        return CountedBatch(super().__call__(samples), len(samples), self.size)


def _taken(batch: Any, indices: list[int], count: int) -> Any:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            batch[name] = _taken(value, indices, count)
        elif isinstance(value, Tensor):
            batch[name] = value[indices]
        elif isinstance(value, list | tuple) and len(value) == count:
            batch[name] = [value[place] for place in indices]
    return batch
