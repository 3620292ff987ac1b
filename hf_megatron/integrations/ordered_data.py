"""Trainer takes the samples of an `OrderedDataset` as they come, and goes on where a checkpoint had ended.

How many samples a run has seen is what it goes on from, on any layout, with any batch size. Stock counts steps of the
batch size that a run has now, shuffles, and leaves out columns that a model's forward does not name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

from ..data.ordered import OrderedDataset
from ..errors import DataError
from . import length_samplers
from .batch_shards import sampler_of

_OWN_ORDER = ("random", "sequential")
# Columns that stock loss functions take, and no model's forward names.
_SHIFTED = "shift_labels"


class OwnOrder(Sampler[int]):
    """Yields the samples of a dataset in their order; an epoch has the whole dataset's length, which is asked early.

    Args:
        dataset: in an order of its own.
        batch (`int`): samples of a step.

    Attributes:
        begin (`int`): the first, those that are skipped batch by batch included; below 0 where more is skipped than was
            seen.
        beyond (`int`): how many follow the last, which nobody is trained on.
    """

    def __init__(self, dataset: OrderedDataset, batch: int):
        self.dataset, self.batch = dataset, batch
        self.begin = self.beyond = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        last = len(self.dataset) - 1
        for sample in range(self.begin, last + 1 + self.beyond):
            # Those that are skipped are not read.
            yield min(max(sample, 0), last)


def get_train_sampler(original: Callable, self: Any, train_dataset: Any = None) -> Any:
    """Returns a sampler that keeps a dataset's own order, and has a callback count its samples."""
    dataset = self.train_dataset if train_dataset is None else train_dataset
    if not isinstance(dataset, OrderedDataset):
        return length_samplers.get_sampler(original, self, train_dataset)
    strategy = self.args.train_sampling_strategy
    if strategy not in _OWN_ORDER:
        raise DataError(f"train_sampling_strategy={strategy!r}: {type(dataset).__name__} has an order of its own.")
    self.remove_callback(SamplesCallback)
    self.add_callback(SamplesCallback())
    return OwnOrder(dataset, self.get_total_train_batch_size(self.args))


class SamplesCallback(TrainerCallback, ExportableState):
    """Counts the samples that training has seen, which its checkpoints say, with the order that they are of."""

    def __init__(self) -> None:
        self.consumed = self._skipped = 0
        self.order_key: dict[str, Any] = {}
        self._sampler: OwnOrder | None = None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint says."""
        # Where nothing is left out: what is left out later does not move it.
        place = self.consumed if self._sampler is None else self._sampler.dataset.place_of(self.consumed)
        return {"args": {}, "attributes": {"consumed": place, "order_key": self.order_key}}

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        # Trainer may have made another callback of this class, of what a checkpoint says.
        sampler = sampler_of(train_dataloader)
        if not isinstance(sampler, OwnOrder):
            self._sampler = None
            return
        self._sampler, self.order_key = sampler, sampler.dataset.order_key
        self.consumed = sampler.dataset.sample_at(sampler.dataset.seen)
        size, batch = len(sampler.dataset), sampler.batch
        if state.global_step and not args.ignore_data_skip:
            said: Any = state.stateful_callbacks
            self._go_on(said.get(type(self).__name__), sampler.dataset)
        last = state.global_step + -(-(size - self.consumed) // batch)
        if args.max_steps <= 0 and self.consumed != state.global_step * batch:
            raise DataError(
                f"{self.consumed} samples were seen in {state.global_step} steps of another batch size than "
                f"{batch}, of which epochs know nothing: train for max_steps={last}."
            )
        if state.max_steps > last:
            raise DataError(
                f"{state.max_steps} steps of {batch} samples need more than the {size} of the dataset, of which "
                f"{self.consumed} were seen in {state.global_step} steps: it ends with step {last}. Build it with "
                f"samples={self.consumed + (state.max_steps - state.global_step) * batch}, or train for "
                f"max_steps={last}."
            )
        self._skipped = 0
        if state.global_step and not args.ignore_data_skip:
            updates = max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
            self._skipped = state.global_step % updates * batch

    def _go_on(self, said: Any, dataset: OrderedDataset) -> None:
        if not isinstance(said, Mapping):
            raise DataError(
                "the checkpoint does not say which samples it has seen: its run had other data. Pass "
                "ignore_data_skip=True to begin with the first one."
            )
        found = said["attributes"]
        if changed := _changes(found["order_key"], self.order_key):
            raise DataError(
                "the samples are not those of the checkpoint, in its order: " + "; ".join(changed) + ". Pass "
                "ignore_data_skip=True to begin with the first one."
            )
        self.consumed = dataset.sample_at(int(found["consumed"]))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._sampler is not None:
            # Stock skips steps of the batch size that there is now.
            self._sampler.begin = self.consumed - self._skipped
            # Batches that do not end with the last sample are not filled up either.
            self._sampler.beyond = 2 * self._sampler.batch if self._sampler.begin else 0
            self._skipped = 0

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._sampler is not None:
            self.consumed = min(self.consumed + self._sampler.batch, len(self._sampler.dataset))


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Names what of a key is another one now."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = dict.fromkeys((*before, *now))
        return [text for one in names for text in _changes(before.get(one), now.get(one), f"{name}.{one}".strip("."))]
    if isinstance(before, list) and isinstance(now, list | tuple) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [text for place, (one, other) in pairs for text in _changes(one, other, f"{name}[{place}]")]
    return [] if before == now else [f"{name} was {before} and is {now}"]


def set_signature_columns(original: Callable, self: Any) -> None:
    """Keeps labels that are shifted already, without which a model shifts them once more."""
    original(self)
    datasets = [self.train_dataset, *_listed(self.eval_dataset)]
    if any(isinstance(dataset, OrderedDataset) for dataset in datasets):
        if not self.model_accepts_loss_kwargs:
            raise DataError(
                f"{type(self.model).__name__}: its forward takes no shift_labels, and would shift labels that are "
                "shifted already."
            )
        if _SHIFTED not in self._signature_columns:
            self._signature_columns.append(_SHIFTED)


def _listed(datasets: Any) -> list[Any]:
    return list(datasets.values()) if isinstance(datasets, Mapping) else [datasets]
