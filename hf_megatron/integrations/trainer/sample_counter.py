"""Count of consumed samples and the sample order, saved in checkpoints and used to resume."""

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset, Sampler
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from ...datasets.ordered_dataset import OrderedDataset
from ...datasets.ramp_up import BatchRampUp
from ...datasets.schedules import MegatronScheduler
from ...datasets.streams import SampleStream
from ...errors import DataError
from ..accelerate.batch_shards import find_sampler
from .callbacks.base import ToolCallback

# Kind of streams whose position upstream derives from the step count.
PLAIN = "rows that steps count"


class OwnOrder(Sampler[int]):
    """Yields the samples of a dataset in order.

    Args:
        dataset: dataset with an order of its own.
        batch (`int`): samples per optimizer step.
        updates (`int`, defaults to 0): optimizer steps of an epoch that is not one pass over the dataset, such as in a
            run that resumes at a sample other than its step count implies; 0 for an ordinary epoch.

    Attributes:
        sizes (`BatchRampUp`): samples of each step.
        begin (`int`): index of the first sample.
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
    """Order of a stream's samples, with the interface of `OwnOrder`."""

    def __init__(self, dataset: SampleStream):
        self.dataset, self.batch = dataset, dataset.batch
        self.sizes = dataset.ramp_up or BatchRampUp(dataset.batch, dataset.batch, 1, 1)

    @property
    def begin(self) -> int:
        """Index of the first sample."""
        return self.dataset.begin

    @begin.setter
    def begin(self, row: int) -> None:
        self.dataset.begin = row


def get_order(loader: Any) -> OwnOrder | StreamOrder | None:
    """Returns the order of a loader's data, or `None` if upstream determines it."""
    if (stream := get_stream(loader)) is not None:
        return StreamOrder(stream) if stream.batch else None
    sampler = None if isinstance(loader.dataset, IterableDataset) else find_sampler(loader)
    return sampler if isinstance(sampler, OwnOrder) else None


def get_stream(loader: Any) -> SampleStream | None:
    """Returns the stream that a loader reads, or `None` for other data."""
    dataset = loader.dataset
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, SampleStream) else None


def require_ending(stream: Any, trained: Any) -> None:
    """Checks that an evaluation of a stream is finite and starts with its first sample; other data passes.

    Raises:
        DataError: the stream has no end, or it is the training stream.
    """
    if isinstance(stream, SampleStream) and (stream.passes is None or stream is trained):
        raise DataError(
            "Evaluation needs a finite SampleStream that is not the training stream. Pass another SampleStream with "
            "passes=1."
        )


class SamplesCallback(ToolCallback, ExportableState):
    """Counts the samples that training has consumed; saved in checkpoints together with the order's key."""

    def __init__(self) -> None:
        self.consumed = self._in_step = self.accumulation = 0
        self.is_loss_unknown = False
        self.order_key: dict[str, Any] = {}
        self._order: OwnOrder | StreamOrder | None = None

    def state(self) -> dict[str, Any]:
        """Returns the state saved in a checkpoint."""
        # Save the position before filtering, so that later changes of the filter do not move it.
        place = self.consumed if self._order is None else self._order.dataset.get_full_index(self.consumed)
        attributes = {"consumed": place, "order_key": self.order_key, "accumulation": self.accumulation}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        # Trainer may have created another callback of this class from the checkpoint.
        self._order = order = get_order(train_dataloader)
        callbacks: Any = state.stateful_callbacks
        saved_state, goes_on = callbacks.get(type(self).__name__), bool(state.global_step and not args.ignore_data_skip)
        # The checkpoint may lack a slot for this callback; create it, because Trainer reads it on save.
        callbacks.setdefault(type(self).__name__, {})
        if order is None:
            if goes_on:
                _require_same_steps(saved_state, self.order_key)
            return
        self.order_key = order.dataset.order_key
        self.consumed = order.dataset.sample_at(order.dataset.seen)
        self.accumulation = args.gradient_accumulation_steps
        self.is_loss_unknown = order.dataset.ramp_up is not None
        if goes_on:
            self._go_on(saved_state, order.dataset)
            before = saved_state["attributes"].get("accumulation", self.accumulation)
            self.is_loss_unknown |= before != self.accumulation
        self._require_schedule(kwargs.get("lr_scheduler"), state.global_step, goes_on=goes_on)
        if isinstance(order, OwnOrder):
            self._require_enough(order, args, state)

    def _require_enough(self, order: OwnOrder, args: Any, state: TrainerState) -> None:
        size, batch, step = len(order.dataset), order.batch, state.global_step
        sizes, grows = order.sizes, order.dataset.ramp_up is not None
        differs_from_stock = grows or self.consumed != step * batch
        last = step + sizes.full_steps(self.consumed, size)
        has_more = sizes.after(last - step, self.consumed) < size
        last += has_more and not differs_from_stock and not args.dataloader_drop_last
        if args.max_steps <= 0 and differs_from_stock:
            steps = "steps of growing size" if grows else f"steps of {batch}"
            raise DataError(
                f"{self.consumed} samples were consumed in {step} {steps}, which num_train_epochs cannot count. Set "
                f"max_steps={last}."
            )
        if state.max_steps > last:
            most = "up to " if grows else ""
            raise DataError(
                f"{state.max_steps} steps of {most}{batch} samples need more than the {size} samples of the dataset, "
                f"of which {self.consumed} were consumed in {step} steps; it ends with step {last}. Build the dataset "
                f"with samples={sizes.after(state.max_steps - step, self.consumed)}, or set max_steps={last}."
            )

    def _require_schedule(self, scheduler: Any, step: int, *, goes_on: bool) -> None:
        if not isinstance(scheduler, MegatronScheduler) or self._order is None:
            return
        has = self._order.dataset.ramp_up or self._order.batch
        if scheduler.samples_per_step != has:
            raise DataError(
                f"MegatronScheduler(samples_per_step={scheduler.samples_per_step}) does not match the {has} samples of "
                "a step (all replicas and microbatches)."
            )
        # The scheduler does not count skipped steps, so its count may be lower after a resume. With a constant batch
        # size its rates are valid at any position.
        is_of_these = scheduler.samples == self.consumed or (goes_on and scheduler.samples < self.consumed)
        if not is_of_these and (step == 0 or self._order.dataset.ramp_up is not None):
            raise DataError(
                f"MegatronScheduler(samples={scheduler.samples}) does not match the {self.consumed} samples consumed "
                "so far, so its learning rates would be wrong."
            )

    def _go_on(self, saved_state: Any, dataset: OrderedDataset | SampleStream) -> None:
        if not isinstance(saved_state, Mapping):
            raise DataError(
                "The checkpoint does not record the consumed samples: its run used other data. Pass "
                "ignore_data_skip=True to start with the first sample."
            )
        attributes = saved_state["attributes"]
        if changed := _changes(attributes["order_key"], self.order_key):
            raise DataError(
                "The data differs from the checkpoint's samples or their order: " + "; ".join(changed) + ". Pass "
                "ignore_data_skip=True to start with the first sample."
            )
        self.consumed = dataset.sample_at(int(attributes["consumed"]))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._order is not None:
            self._order.begin = self.consumed

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The stream's passes have ended; upstream would start another epoch.
        if isinstance(self._order, StreamOrder):
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.abandon()
        if isinstance(scheduler := kwargs.get("lr_scheduler"), MegatronScheduler):
            scheduler.step_size = None

    def abandon(self) -> None:
        """Resets a stream, so that its next reader starts with the first sample."""
        if isinstance(self._order, StreamOrder):
            self._order.dataset.begin = self._order.dataset.batch = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_step = 0
        if self._order is not None and isinstance(scheduler := kwargs.get("lr_scheduler"), MegatronScheduler):
            scheduler.step_size = self._order.sizes.batch_size(self.consumed)

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._in_step += 1

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Count only at the end of a step: a checkpoint saved within a step does not include its samples.
        if self._order is not None:
            left_out = args.gradient_accumulation_steps - self.calls(args.gradient_accumulation_steps)
            self.consumed += self._order.batch // args.gradient_accumulation_steps * (self._in_step + 1 - left_out)
            if isinstance(self._order, OwnOrder):
                self.consumed = min(self.consumed, len(self._order.dataset))

    def calls(self, most: int) -> int:
        """Returns the microbatches of the next step, where a full-size step has `most`."""
        if self._order is None:
            return most
        return self._order.sizes.batch_size(self.consumed) * most // self._order.batch


def _require_same_steps(saved_state: Any, now: Mapping[str, Any]) -> None:
    """Checks that the samples per step of a stream match the checkpoint, because upstream skips by steps."""
    before = saved_state.get("attributes", {}).get("order_key", {}) if isinstance(saved_state, Mapping) else {}
    if now.get("kind") == before.get("kind") == PLAIN and now["batch"] != before["batch"]:
        raise DataError(
            f"A step has {now['batch']} samples of the stream, but had {before['batch']} in the checkpoint, so the "
            "wrong samples would be skipped. Give Trainer a SampleStream of the data (hf_megatron.datasets.streams), "
            "which counts samples."
        )


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Returns a description of each entry of a key that has changed."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = dict.fromkeys((*before, *now))
        return [text for one in names for text in _changes(before.get(one), now.get(one), f"{name}.{one}".strip("."))]
    if isinstance(before, list) and isinstance(now, list | tuple) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [text for place, (one, other) in pairs for text in _changes(one, other, f"{name}[{place}]")]
    return [] if before == now else [f"{name} was {before} and is {now}"]
