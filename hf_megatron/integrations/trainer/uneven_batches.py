"""Rejection of an incomplete last batch in trainers whose loss would count the samples repeated to fill it."""

import warnings
from collections.abc import Callable, Mapping, Sized
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset

from ...errors import UnsupportedError
from ...losses.targets import LABELS
from ...parallel_state import parallel_state
from ..accelerate.batch_shards import find_batch_shard, is_filled_up, samples_on_all_ranks
from .global_batches import first_batch, pad_for_evaluation, pad_for_training
from .ordered_data import count_rows, require_all_rows
from .sample_counter import get_stream, require_ending


def prepare_for_training(original: Callable, self: Any, max_steps: int, train_dataloader: Any, *args: Any) -> Any:
    """Trains on samples padded as in a single process, and counts none of them twice.

    Raises:
        UnsupportedError: training, or an evaluation during training, would include repeated samples that the trainer's
            loss may count.
    """
    count_rows(self, train_dataloader)
    _require_full_batches(self, train_dataloader, max_steps)
    datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
    for name, dataset in datasets.items():
        is_evaluated = self.args.eval_strategy != "no"
        if is_evaluated:
            require_ending(dataset, self.train_dataset)
        if dataset is not None and not takes_any_rows(self):
            _check_later_evaluation(self, self.get_eval_dataloader(name or dataset), is_evaluated=is_evaluated)
    pad_for_training(self, train_dataloader)
    return original(self, max_steps, train_dataloader, *args)


def evaluation_loop(original: Callable, self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluates and predicts on samples padded as in a single process, and counts none of them twice.

    Raises:
        DataError: a stream without an end.
        UnsupportedError: samples are repeated, and the trainer's loss may count them.
    """
    stream = get_stream(dataloader)
    require_ending(stream, stream if stream is not None and stream.batch else None)
    require_all_rows(stream, dataloader)
    require_full_evaluation(self, dataloader)
    pad_for_evaluation(self, dataloader)
    return original(self, dataloader, *args, **kwargs)


def _require_full_batches(trainer: Any, loader: Any, max_steps: int) -> None:
    if (last := _last_batch(trainer, loader)) is not None:
        steps = -(-last.number // trainer.args.gradient_accumulation_steps)
        if max_steps >= steps and last.is_counted_twice():
            _reject(trainer, last.describe(), "train", "per_device_train_batch_size")


def require_full_evaluation(trainer: Any, loader: Any) -> None:
    """Raises `UnsupportedError` if an evaluation repeats samples that the trainer's loss may count."""
    if (last := _last_batch(trainer, loader)) is not None and last.is_counted_twice():
        _reject(trainer, last.describe(), "evaluate", "per_device_eval_batch_size")


def _check_later_evaluation(trainer: Any, loader: Any, *, is_evaluated: bool) -> None:
    """Raises before training if an evaluation during it would; warns if only a call of `evaluate` after it would."""
    try:
        require_full_evaluation(trainer, loader)
    except UnsupportedError as error:
        if is_evaluated:
            raise
        warnings.warn(f"trainer.evaluate() would raise: {error}", stacklevel=4)


class _LastBatch(NamedTuple):
    """The incomplete last batch of a loader."""

    number: int
    size: int
    rows: int
    loader: Any
    samples_per_rank: int

    def is_counted_twice(self) -> bool:
        return not has_token_targets(first_batch(self.loader.base_dataloader, self.samples_per_rank))

    def describe(self) -> str:
        return f"the last of {self.number} batches of {self.size} samples has {self.rows}"


def _last_batch(trainer: Any, loader: Any) -> _LastBatch | None:
    """Returns the last batch if Accelerate is known to fill it with repeated samples that may affect the loss."""
    state, shard = parallel_state(trainer.model), find_batch_shard(loader)
    if state is None or not state.loss.has_data_parallel or takes_any_rows(trainer):
        return None
    if shard is None or shard.batch_size is None or shard.drop_last or not shard.even_batches:
        return None
    sampler, size = shard.batch_sampler.sampler, samples_on_all_ranks(shard)
    if isinstance(loader.dataset, IterableDataset) or not isinstance(sampler, Sized) or len(sampler) % size == 0:
        return None
    return _LastBatch(-(-len(sampler) // size), size, len(sampler) % size, loader, shard.batch_size)


def require_full_batch(trainer: Any, batch: Any, *, is_evaluated: bool = False) -> None:
    """Raises `UnsupportedError` if this rank's current batch has repeated samples that the trainer's loss may count."""
    state: Any = parallel_state(trainer.model)
    if takes_any_rows(trainer) or has_token_targets(batch):
        return
    if is_filled_up(trainer.accelerator.gradient_state, state.mesh.dp_size):
        words = ("evaluate", "per_device_eval_batch_size") if is_evaluated else ("train", "per_device_train_batch_size")
        _reject(trainer, "the last batch has fewer samples than the others", *words)


def takes_any_rows(trainer: Any) -> bool:
    """Returns whether the trainer's loss is known to handle batch sizes that differ between ranks.

    A subclass may gather one value per sample, as DPOTrainer does, which fails or deadlocks with unequal sizes. For
    such trainers the repeated samples stay in the batch, with their token targets masked.
    """
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    return "compute_loss" not in vars(trainer) and owner.__name__ in ("Trainer", "SFTTrainer")


def has_token_targets(batch: Any) -> bool:
    """Returns whether a batch has targets `[batch, sequence]`, which can be masked for some of its samples."""
    # Trainers that generate receive their samples as a list.
    targets = [batch.get(name) for name in LABELS] if isinstance(batch, Mapping) else []
    return any(isinstance(target, Tensor) and target.dim() > 1 for target in targets)


def _reject(trainer: Any, what: str, verb: str, size: str) -> None:
    state: Any = parallel_state(trainer.model)
    raise UnsupportedError(
        f"{type(trainer).__name__} on {state.mesh.dp_size} data-parallel ranks: {what}. Accelerate fills it with "
        f"repeated samples, which the trainer's loss may count. Set dataloader_drop_last=True, or {verb} on a number "
        f"of samples that is a multiple of {size} times the data-parallel ranks."
    )
