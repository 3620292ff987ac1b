"""Trainer takes the samples of an `OrderedDataset` as they come, and goes on where a checkpoint had ended.

How many samples a run has seen is what it goes on from, on any layout, with any batch size. Stock counts steps of the
batch size that a run has now, shuffles, and leaves out columns that a model's forward does not name.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset, Sampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

from ..data.ordered import OrderedDataset
from ..data.own_order import has_own_order, is_shifted, ordered_of, require_whole
from ..data.ramp_up import BatchRampUp
from ..data.schedules import MegatronScheduler
from ..data.streams import Stream
from ..errors import DataError
from ..parallel_state import parallel_state
from . import length_samplers
from .batch_shards import sampler_of

_OWN_ORDER = ("random", "sequential")
# Columns that stock loss functions take, and no model's forward names.
_SHIFTED = "shift_labels"
# Streams whose steps stock counts.
_PLAIN = "rows that steps count"


class OwnOrder(Sampler[int]):
    """Yields the samples of a dataset in their order.

    Args:
        dataset: in an order of its own.
        batch (`int`): samples of a step.
        updates (`int`, defaults to 0): of an epoch that is no pass over the dataset, as of a run that goes on elsewhere
            than its steps say; 0 for an ordinary one.

    Attributes:
        sizes (`BatchRampUp`): how many samples each step has.
        begin (`int`): the first.
    """

    def __init__(self, dataset: OrderedDataset, batch: int, updates: int = 0):
        self.dataset, self.batch, self.updates = dataset, batch, updates
        self.sizes = dataset.ramp_up or BatchRampUp(batch, batch, 1, 1)
        self.begin = 0

    def __len__(self) -> int:
        return self.batch * self.updates or len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, len(self.dataset)))


class StreamOrder:
    """How the rows of a stream are taken, with what `OwnOrder` says of a dataset's."""

    def __init__(self, dataset: Stream):
        self.dataset, self.batch = dataset, dataset.batch
        self.sizes = dataset.ramp_up or BatchRampUp(dataset.batch, dataset.batch, 1, 1)

    @property
    def begin(self) -> int:
        """The first row."""
        return self.dataset.begin

    @begin.setter
    def begin(self, row: int) -> None:
        self.dataset.begin = row


def count_rows(trainer: Any) -> None:
    """Has a callback count the rows of a stream that a trainer takes for its steps.

    Raises:
        DataError: a stream that several workers would read, or steps that are no whole calls.
    """
    rows, args = trainer.train_dataset, trainer.args
    if not isinstance(rows, IterableDataset):
        return
    batch = trainer.get_total_train_batch_size(args)
    counting = SamplesCallback()
    if isinstance(rows, Stream):
        if args.dataloader_num_workers > 1:
            workers = f"dataloader_num_workers={args.dataloader_num_workers}"
            raise DataError(f"{workers}: each would read a part of the stream. Expected 1 or 0.")
        _require_countable(args, rows.ramp_up, batch)
        if rows.is_mosaic and args.world_size > 1 and trainer.accelerator.dispatch_batches is not False:
            raise DataError(
                "accelerator_config={'dispatch_batches': False} is missing: one process would read for all, and those "
                "of a host read a set of MosaicML's together."
            )
        rows.batch = batch
        # Shuffled streams of `datasets` have another order in a worker than without one.
        rows.order_key["workers"] = args.dataloader_num_workers
    elif parallel_state(trainer.model) is None:
        return
    else:
        counting.order_key = {"kind": _PLAIN, "batch": batch}
    trainer.remove_callback(SamplesCallback)
    trainer.callback_handler.callbacks.insert(0, counting)


def skip_first_batches(original: Callable, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    """Skips nothing of what begins where it is to go on."""
    return dataloader if _order_of(dataloader) is not None else original(dataloader, *args, **kwargs)


def _order_of(loader: Any) -> OwnOrder | StreamOrder | None:
    dataset = loader.dataset
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    if isinstance(dataset, Stream):
        return StreamOrder(dataset) if dataset.batch else None
    sampler = None if isinstance(dataset, IterableDataset) else sampler_of(loader)
    return sampler if isinstance(sampler, OwnOrder) else None


def get_train_sampler(original: Callable, self: Any, train_dataset: Any = None) -> Any:
    """Returns a sampler that keeps a dataset's own order, and has a callback count its samples."""
    given = self.train_dataset if train_dataset is None else train_dataset
    if not has_own_order(given):
        return length_samplers.get_sampler(original, self, train_dataset)
    dataset = ordered_of(given)
    if dataset is None:
        raise DataError(
            f"{type(given).__name__} around a dataset with an order of its own would be shuffled: pass that one; "
            "WithoutSamples leaves some of it out."
        )
    require_whole(given)
    if is_shifted(given):
        _require_shifted(self)
        collated = self.data_collator([given[0]])
        if isinstance(collated, Mapping) and "labels" in collated and _SHIFTED not in collated:
            raise DataError(
                f"the data collator leaves {_SHIFTED} out, and the model would shift labels that are shifted already: "
                "default_data_collator keeps them."
            )
    args = self.args
    if args.train_sampling_strategy not in _OWN_ORDER:
        strategy = f"train_sampling_strategy={args.train_sampling_strategy!r}"
        raise DataError(f"{strategy}: {type(dataset).__name__} has an order of its own.")
    batch = self.get_total_train_batch_size(args)
    _require_countable(args, dataset.ramp_up, batch)
    self.remove_callback(SamplesCallback)
    # Before those that save at the end of a step.
    self.callback_handler.callbacks.insert(0, SamplesCallback())
    step, consumed = _told(vars(self).get("_hf_megatron_resumed"))
    if args.ignore_data_skip or consumed is None:
        consumed = dataset.seen
    is_elsewhere = dataset.ramp_up is not None or dataset.sample_at(consumed) != step * batch
    return OwnOrder(dataset, batch, max(0, args.max_steps) if is_elsewhere else 0)


def _require_countable(args: Any, sizes: BatchRampUp | None, batch: int) -> None:
    if args.accelerator_config.split_batches:
        raise DataError("split_batches=True: how many samples a step has is counted for batches of each replica.")
    if sizes is None:
        return
    call = batch // args.gradient_accumulation_steps
    if sizes.global_batch_size != batch:
        raise DataError(f"{sizes}: a step has {batch} samples, of all replicas and gradient_accumulation_steps.")
    wrong = [size for size in sizes.batch_sizes() if size % call]
    if wrong:
        raise DataError(
            f"{sizes}: steps have to be whole calls of {call} samples, of all replicas, and {wrong[0]} are none. Set "
            "per_device_train_batch_size lower and gradient_accumulation_steps higher."
        )


def get_eval_sampler(original: Callable, self: Any, eval_dataset: Any) -> Any:
    """Returns stock's sampler, of data whose labels the model does not shift again."""
    if is_shifted(eval_dataset):
        _require_shifted(self)
    return length_samplers.get_sampler(original, self, eval_dataset)


def _require_shifted(trainer: Any) -> None:
    if not trainer.model_accepts_loss_kwargs:
        raise DataError(
            f"{type(trainer.model).__name__}: its forward takes no shift_labels, and would shift labels that are "
            "shifted already."
        )
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(trainer.model, peft.PeftModel):
        adapter = trainer.model.active_peft_config
        if adapter.is_prompt_learning and adapter.peft_type != "PREFIX_TUNING":
            raise DataError(
                f"{adapter.peft_type.value}: PEFT puts its prompt before the labels, and not before labels that are "
                "shifted already. Use another adapter, as LoRA or prefix tuning."
            )
    if trainer.compute_loss_func is not None:
        raise DataError(
            "compute_loss_func: it gets labels that are shifted already. Override Trainer.compute_loss with a loss "
            "that does not shift them."
        )
    if trainer.args.label_smoothing_factor:
        raise DataError(
            f"label_smoothing_factor={trainer.args.label_smoothing_factor}: Trainer's smoothing would shift labels "
            "that are shifted already."
        )


def _told(checkpoint: Any) -> tuple[int, int | None]:
    """Returns the steps and the samples that a checkpoint says, where it says them."""
    path = None if checkpoint is None else Path(checkpoint, TRAINER_STATE_NAME)
    if path is None or not path.is_file():
        return 0, None
    state = TrainerState.load_from_json(str(path))
    said: Any = state.stateful_callbacks
    found = said.get(SamplesCallback.__name__) or {}
    return state.global_step, found.get("attributes", {}).get("consumed")


class SamplesCallback(TrainerCallback, ExportableState):
    """Counts the samples that training has seen, which its checkpoints say, with the order that they are of."""

    def __init__(self) -> None:
        self.consumed = self._in_step = 0
        self.order_key: dict[str, Any] = {}
        self._order: OwnOrder | StreamOrder | None = None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint says."""
        # Where nothing is left out: what is left out later does not move it.
        place = self.consumed if self._order is None else self._order.dataset.place_of(self.consumed)
        return {"args": {}, "attributes": {"consumed": place, "order_key": self.order_key}}

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        # Trainer may have made another callback of this class, of what a checkpoint says.
        self._order = order = _order_of(train_dataloader)
        callbacks: Any = state.stateful_callbacks
        said, goes_on = callbacks.get(type(self).__name__), bool(state.global_step and not args.ignore_data_skip)
        # Of a checkpoint that had none; Trainer looks for it when it saves.
        callbacks.setdefault(type(self).__name__, {})
        if order is None:
            if goes_on:
                _require_same_steps(said, self.order_key)
            return
        self.order_key = order.dataset.order_key
        self.consumed = order.dataset.sample_at(order.dataset.seen)
        if goes_on:
            self._go_on(said, order.dataset)
        self._require_schedule(kwargs.get("lr_scheduler"), state.global_step)
        if isinstance(order, OwnOrder):
            self._require_enough(order, args, state)

    def _require_enough(self, order: OwnOrder, args: Any, state: TrainerState) -> None:
        size, batch, step = len(order.dataset), order.batch, state.global_step
        sizes, grows = order.sizes, order.dataset.ramp_up is not None
        is_elsewhere = grows or self.consumed != step * batch
        last = step + sizes.whole_steps(self.consumed, size)
        has_more = sizes.after(last - step, self.consumed) < size
        last += has_more and not is_elsewhere and not args.dataloader_drop_last
        if args.max_steps <= 0 and is_elsewhere:
            steps = "steps that grow" if grows else f"steps of {batch}"
            raise DataError(
                f"{self.consumed} samples were seen in {step} {steps}, of which epochs know nothing: train for "
                f"max_steps={last}."
            )
        if state.max_steps > last:
            most = "up to " if grows else ""
            raise DataError(
                f"{state.max_steps} steps of {most}{batch} samples need more than the {size} of the dataset, of which "
                f"{self.consumed} were seen in {step} steps: it ends with step {last}. Build it with "
                f"samples={sizes.after(state.max_steps - step, self.consumed)}, or train for max_steps={last}."
            )

    def _require_schedule(self, scheduler: Any, step: int) -> None:
        if not isinstance(scheduler, MegatronScheduler) or self._order is None:
            return
        has = self._order.dataset.ramp_up or self._order.batch
        if scheduler.samples_per_step != has:
            raise DataError(
                f"MegatronScheduler(samples_per_step={scheduler.samples_per_step}): a step has {has} samples, of all "
                "replicas and calls."
            )
        if step == 0 and scheduler.samples != self._order.dataset.seen:
            raise DataError(
                f"MegatronScheduler(samples={scheduler.samples}): the dataset's first {self._order.dataset.seen} "
                "samples were seen."
            )

    def _go_on(self, said: Any, dataset: OrderedDataset | Stream) -> None:
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
        if self._order is not None:
            self._order.begin = self.consumed

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The passes over it have ended; stock would begin another.
        if isinstance(self._order, StreamOrder):
            control.should_training_stop = True

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_step = 0

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_step += 1

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # What is saved within a step does not have its samples.
        if self._order is not None:
            left_out = args.gradient_accumulation_steps - self.calls(args.gradient_accumulation_steps)
            self.consumed += self._order.batch // args.gradient_accumulation_steps * (self._in_step + 1 - left_out)
            if isinstance(self._order, OwnOrder):
                self.consumed = min(self.consumed, len(self._order.dataset))

    def calls(self, most: int) -> int:
        """Returns how many calls the next step has, where the largest one has `most`."""
        if self._order is None:
            return most
        return self._order.sizes.batch_size(self.consumed) * most // self._order.batch


def _require_same_steps(said: Any, now: Mapping[str, Any]) -> None:
    """Checks that steps of a stream have as many rows as those of a checkpoint, by which stock counts them."""
    before = said.get("attributes", {}).get("order_key", {}) if isinstance(said, Mapping) else {}
    if now.get("kind") == before.get("kind") == _PLAIN and now["batch"] != before["batch"]:
        raise DataError(
            f"a step has {now['batch']} rows of the stream, and had {before['batch']}: other rows than were seen would "
            "be skipped. Give Trainer a Stream of it (hf_megatron.data.streams), which counts rows."
        )


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
    if self.model_accepts_loss_kwargs and _SHIFTED not in self._signature_columns:
        self._signature_columns.append(_SHIFTED)
