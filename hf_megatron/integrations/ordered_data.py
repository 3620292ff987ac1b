"""Trainer takes the samples of an `OrderedDataset` as they come, and goes on where a checkpoint had ended.

How many samples a run has seen is what it goes on from, on any layout, with any batch size. Stock counts steps of the
batch size that a run has now, shuffles, and leaves out columns that a model's forward does not name.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

from ..data.ordered import OrderedDataset, has_own_order, is_shifted
from ..data.ramp_up import BatchRampUp
from ..data.schedules import MegatronScheduler
from ..errors import DataError
from . import length_samplers
from .batch_shards import sampler_of

_OWN_ORDER = ("random", "sequential")
# Columns that stock loss functions take, and no model's forward names.
_SHIFTED = "shift_labels"


class OwnOrder(Sampler[int]):
    """Yields the samples of a dataset in their order.

    Args:
        dataset: in an order of its own.
        batch (`int`): samples of a step.
        updates (`int`, defaults to 0): of an epoch that is no pass over the dataset, as of a run that goes on elsewhere
            than its steps say; 0 for an ordinary one.

    Attributes:
        sizes (`BatchRampUp`): how many samples each step has.
        begin (`int`): the first, those that are skipped batch by batch included; below 0 where more is skipped than was
            seen.
    """

    def __init__(self, dataset: OrderedDataset, batch: int, updates: int = 0):
        self.dataset, self.batch, self.updates = dataset, batch, updates
        self.sizes = dataset.ramp_up or BatchRampUp(batch, batch, 1, 1)
        self.begin = 0

    def __len__(self) -> int:
        return self.batch * self.updates or len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        # Those that are skipped are not read.
        return (max(sample, 0) for sample in range(self.begin, len(self.dataset)))


def get_train_sampler(original: Callable, self: Any, train_dataset: Any = None) -> Any:
    """Returns a sampler that keeps a dataset's own order, and has a callback count its samples."""
    dataset = self.train_dataset if train_dataset is None else train_dataset
    if not has_own_order(dataset):
        return length_samplers.get_sampler(original, self, train_dataset)
    if not isinstance(dataset, OrderedDataset):
        raise DataError(
            f"{type(dataset).__name__} around a dataset with an order of its own would be shuffled: pass that one; "
            "WithoutSamples leaves some of it out."
        )
    if dataset.is_shifted:
        _require_shifted(self)
        collated = self.data_collator([dataset[0]])
        if isinstance(collated, Mapping) and "labels" in collated and _SHIFTED not in collated:
            raise DataError(
                f"the data collator leaves {_SHIFTED} out, and the model would shift labels that are shifted already: "
                "default_data_collator keeps them."
            )
    args = self.args
    if args.train_sampling_strategy not in _OWN_ORDER:
        strategy = f"train_sampling_strategy={args.train_sampling_strategy!r}"
        raise DataError(f"{strategy}: {type(dataset).__name__} has an order of its own.")
    if args.accelerator_config.split_batches:
        raise DataError("split_batches=True: how many samples a step has is counted for batches of each replica.")
    self.remove_callback(SamplesCallback)
    # Before those that save at the end of a step.
    self.callback_handler.callbacks.insert(0, SamplesCallback())
    batch = self.get_total_train_batch_size(args)
    _require_whole_calls(dataset.ramp_up, batch, batch // args.gradient_accumulation_steps)
    step, consumed = _told(vars(self).get("_hf_megatron_resumed"))
    if args.ignore_data_skip or consumed is None:
        consumed = dataset.seen
    is_elsewhere = dataset.ramp_up is not None or dataset.sample_at(consumed) != step * batch
    return OwnOrder(dataset, batch, max(0, args.max_steps) if is_elsewhere else 0)


def _require_whole_calls(sizes: BatchRampUp | None, batch: int, call: int) -> None:
    if sizes is None:
        return
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
        self.consumed = self._skipped = self._in_step = 0
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
        size, batch, step, name = len(sampler.dataset), sampler.batch, state.global_step, type(self).__name__
        callbacks: Any = state.stateful_callbacks
        if step and not args.ignore_data_skip:
            self._go_on(callbacks.get(name), sampler.dataset)
        # Of a checkpoint that had none; Trainer looks for it when it saves.
        callbacks.setdefault(name, {})
        self._require_schedule(kwargs.get("lr_scheduler"), step)
        sizes, grows = sampler.sizes, sampler.dataset.ramp_up is not None
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
        self._skipped = 0
        if step and not args.ignore_data_skip:
            updates = max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
            self._skipped = step % updates * batch

    def _require_schedule(self, scheduler: Any, step: int) -> None:
        if not isinstance(scheduler, MegatronScheduler) or self._sampler is None:
            return
        has = self._sampler.dataset.ramp_up or self._sampler.batch
        if scheduler.samples_per_step != has:
            raise DataError(
                f"MegatronScheduler(samples_per_step={scheduler.samples_per_step}): a step has {has} samples, of all "
                "replicas and calls."
            )
        if step == 0 and scheduler.samples != self._sampler.dataset.seen:
            raise DataError(
                f"MegatronScheduler(samples={scheduler.samples}): the dataset's first {self._sampler.dataset.seen} "
                "samples were seen."
            )

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
            self._skipped = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_step = 0

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_step += 1

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # What is saved within a step does not have its samples.
        if self._sampler is not None:
            left_out = args.gradient_accumulation_steps - self.calls(args.gradient_accumulation_steps)
            rows = self._sampler.batch // args.gradient_accumulation_steps * (self._in_step + 1 - left_out)
            self.consumed = min(self.consumed + rows, len(self._sampler.dataset))

    def calls(self, most: int) -> int:
        """Returns how many calls the next step has, where the largest one has `most`."""
        if self._sampler is None:
            return most
        return self._sampler.sizes.batch_size(self.consumed) * most // self._sampler.batch


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
