"""A last batch that the rows do not fill, in trainers whose loss counts the rows that are repeated to fill it."""

from collections.abc import Callable, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from ..errors import UnsupportedError
from ..loss import LABELS
from ..parallel_state import parallel_state
from .batch_shards import is_filled_up, rows_of_all_ranks, shard_of
from .whole_batches import first_batch, pad_for_training


def prepare_for_training(original: Callable, self: Any, max_steps: int, train_dataloader: Any, *args: Any) -> Any:
    """Trains on rows that are padded as in one process, and on none of them twice.

    Raises:
        UnsupportedError: where training would come to repeated rows, and the trainer's loss may count them.
    """
    _require_full_batches(self, train_dataloader, max_steps)
    pad_for_training(self, train_dataloader)
    return original(self, max_steps, train_dataloader, *args)


def _require_full_batches(trainer: Any, loader: Any, max_steps: int) -> None:
    state, shard = parallel_state(trainer.model), shard_of(loader)
    if state is None or not state.loss.is_spread or takes_any_rows(trainer):
        return
    if shard is None or shard.batch_size is None or shard.drop_last or not shard.even_batches:
        return
    sampler, size = shard.batch_sampler.sampler, rows_of_all_ranks(shard)
    if isinstance(loader.dataset, IterableDataset) or not isinstance(sampler, Sized) or len(sampler) % size == 0:
        return
    batches = -(-len(sampler) // size)
    steps = -(-batches // trainer.args.gradient_accumulation_steps)
    if max_steps >= steps and not has_targets_of_tokens(first_batch(loader.base_dataloader, shard.batch_size)):
        _refuse(trainer, state, f"the last of {batches} batches of {size} rows has {len(sampler) % size}")


def require_full_batch(trainer: Any, batch: Any) -> None:
    """Raises `UnsupportedError` for a batch of this rank under way whose repeated rows the trainer's loss may count."""
    state: Any = parallel_state(trainer.model)
    if takes_any_rows(trainer) or has_targets_of_tokens(batch):
        return
    if is_filled_up(trainer.accelerator.gradient_state, state.mesh.dp_size):
        _refuse(trainer, state, "the last batch has fewer rows than the others")


def takes_any_rows(trainer: Any) -> bool:
    """Tells whether a loss is known to do with batches whose sizes differ between ranks.

    A subclass may gather a number per row, as DPOTrainer does, which ends in an error or waits for ever then. Its
    repeated rows stay, without the targets of their tokens.
    """
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    return "compute_loss" not in vars(trainer) and owner.__name__ in ("Trainer", "SFTTrainer")


def has_targets_of_tokens(batch: Any) -> bool:
    """Tells whether a batch has targets `[rows, sequence]`, which can be taken away from some of its rows."""
    return any(isinstance(batch.get(name), Tensor) and batch[name].dim() > 1 for name in LABELS)


def _refuse(trainer: Any, state: Any, what: str) -> None:
    raise UnsupportedError(
        f"{type(trainer).__name__} on {state.mesh.dp_size} data parallel ranks: {what}. Accelerate repeats rows to "
        "fill it, which a loss of its own would count. Set dataloader_drop_last=True, or train on a number of rows "
        "that per_device_train_batch_size times the data parallel ranks divides."
    )
