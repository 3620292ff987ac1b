"""Trainer support for `OrderedDataset` and `SampleStream`: fixed sample order and resume by consumed samples.

A run resumes from the number of samples it has seen, on any layout and with any batch size. Upstream counts steps of
the current batch size instead, shuffles, and drops columns that a model's forward does not name.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ...datasets.dataset_order import get_ordered_dataset, has_own_order, is_shifted, require_full
from ...datasets.ramp_up import BatchRampUp
from ...datasets.streams import SampleStream
from ...errors import DataError
from ...parallel_state import parallel_state
from ..accelerate.environment import job_world_size
from . import length_samplers
from .sample_counter import PLAIN, OwnOrder, SamplesCallback, get_order, get_stream

_OWN_ORDER = ("random", "sequential")
# Column that stock loss functions accept although no model's forward names it.
_SHIFTED = "shift_labels"


def get_dataloader(original: Callable, self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the stock loader, configured so that every rank reads a stream itself.

    With dispatching, rank 0 would split its batches over the ranks, which requires equal lengths, and MosaicML datasets
    are read jointly by the processes of a host.
    """
    configuration = self.accelerator.dataloader_config
    if not isinstance(dataset, SampleStream) or configuration.dispatch_batches is not None:
        return original(self, dataset, *args, **kwargs)
    configuration.dispatch_batches = False
    try:
        return original(self, dataset, *args, **kwargs)
    finally:
        configuration.dispatch_batches = None


def count_rows(trainer: Any, loader: Any) -> None:
    """Installs a callback that counts the consumed samples of data with an order of its own.

    Raises:
        DataError: ranks or workers would read a stream differently, or a step is not an integral number of calls.
    """
    rows, args, counting = trainer.train_dataset, trainer.args, SamplesCallback()
    batch = trainer.get_total_train_batch_size(args)
    if (stream := get_stream(loader)) is not None:
        if args.dataloader_num_workers > 1:
            raise DataError(
                f"dataloader_num_workers={args.dataloader_num_workers}: a stream cannot be split over several workers. "
                "Use 0 or 1."
            )
        _require_countable(args, stream.ramp_up, batch)
        require_all_rows(stream, loader)
        stream.batch = batch
        # Shuffled `datasets` streams have a different order inside a worker process.
        stream.order_key["workers"] = args.dataloader_num_workers
        stream.order_key["first rows"] = _first_rows(stream, isinstance(loader, DataLoaderDispatcher))
    elif get_order(loader) is None:
        if not isinstance(rows, IterableDataset) or parallel_state(trainer.model) is None:
            return
        counting.order_key = {"kind": PLAIN, "batch": batch}
    trainer.remove_callback(SamplesCallback)
    # Count before callbacks that save at the end of a step.
    trainer.callback_handler.callbacks.insert(0, counting)


def require_all_rows(stream: SampleStream | None, loader: Any) -> None:
    """Checks that each rank reads all samples of a stream; other data passes.

    Raises:
        DataError: a MosaicML dataset that is configured to shard its samples over the ranks.
    """
    ranks = job_world_size()
    if stream is None or not stream.is_mosaic or ranks == 1:
        return
    if isinstance(loader, DataLoaderDispatcher):
        raise DataError(
            "dispatch_batches=True is not supported for a MosaicML dataset: the processes of a host read it together."
        )
    rows: Any = stream.rows
    if rows.replication != ranks:
        raise DataError(
            f"StreamingDataset(replication={rows.replication}) gives each rank different samples. Set "
            f"replication={ranks}, the number of ranks: Trainer itself distributes the samples over the replicas."
        )


def _first_rows(rows: SampleStream, is_dispatched: bool) -> str:
    """Returns the hash of a stream's first samples, which must be identical on all ranks that read it."""
    if not dist.is_initialized():
        return rows.fingerprint()
    local_hash, is_read = None, False
    rank_hashes: list[tuple[str | None, bool]] = [(None, False)] * dist.get_world_size()
    try:
        if not is_dispatched or dist.get_rank() == 0:
            local_hash = rows.fingerprint()
        is_read = True
    finally:
        # Exchange results even on failure: the other ranks are in the same collective and must learn of the error.
        dist.all_gather_object(rank_hashes, (local_hash, is_read))
    failed = [str(rank) for rank, (_, is_read) in enumerate(rank_hashes) if not is_read]
    if failed:
        raise DataError(f"The stream could not be read on rank {', '.join(failed)}.")
    hashes = {one for one, _ in rank_hashes if one is not None}
    if len(hashes) > 1:
        raise DataError(
            "The ranks read different samples of the stream. Give shuffling and sampling a fixed seed, and do not "
            "shard the stream by rank: Trainer itself distributes the samples over the replicas."
        )
    return hashes.pop()


def skip_first_batches(original: Callable, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    """Skips no batches of a loader that already starts at the resume position."""
    return dataloader if get_order(dataloader) is not None else original(dataloader, *args, **kwargs)


def get_train_sampler(original: Callable, self: Any, train_dataset: Any = None) -> Any:
    """Returns a sampler that keeps a dataset's own order; other datasets get upstream's sampler.

    Raises:
        DataError: the order or the dataset's labels would be lost: a wrapper that shuffles, a collator that drops or
            shifts labels, another sampling strategy, or steps of an uncountable size.
    """
    train_data = self.train_dataset if train_dataset is None else train_dataset
    if not has_own_order(train_data):
        return length_samplers.get_sampler(original, self, train_dataset)
    dataset = get_ordered_dataset(train_data)
    if dataset is None:
        raise DataError(
            f"{type(train_data).__name__} wraps a dataset that defines its own sample order and would be shuffled. "
            "Pass the "
            "dataset itself; to leave out samples, use WithoutSamples."
        )
    require_full(train_data)
    if is_shifted(train_data):
        _require_shifted(self)
        collated = self.data_collator([train_data[0]])
        if isinstance(collated, Mapping) and "labels" in collated and _SHIFTED not in collated:
            raise DataError(
                f"The data collator drops {_SHIFTED}, so the model would shift the already shifted labels again. Use "
                "default_data_collator."
            )
    elif train_data is not dataset:
        row = train_data[0]["labels"]
        collated = self.data_collator([train_data[0]])
        labels = collated.get("labels") if isinstance(collated, Mapping) else None
        if labels is None or labels[0][: len(row)].tolist() != row:
            raise DataError(
                f"{type(self.data_collator).__name__} replaces the labels of the dataset by its own. Use "
                "DataCollatorForSeq2Seq or TRL's collator."
            )
    args = self.args
    if args.train_sampling_strategy not in _OWN_ORDER:
        strategy = f"train_sampling_strategy={args.train_sampling_strategy!r}"
        raise DataError(f"{strategy} is not supported: {type(dataset).__name__} defines its own sample order.")
    batch = self.get_total_train_batch_size(args)
    _require_countable(args, dataset.ramp_up, batch)
    step, consumed = _reported(vars(self).get("_hf_megatron_resumed"))
    if args.ignore_data_skip or consumed is None:
        consumed = dataset.seen
    differs_from_stock = dataset.ramp_up is not None or dataset.sample_at(consumed) != step * batch
    return OwnOrder(dataset, batch, max(0, args.max_steps) if differs_from_stock else 0)


def _require_countable(args: Any, sizes: BatchRampUp | None, batch: int) -> None:
    if args.accelerator_config.split_batches:
        raise DataError(
            "split_batches=True is not supported, because samples are counted per replica. Set split_batches=False."
        )
    if sizes is None:
        return
    call = batch // args.gradient_accumulation_steps
    if sizes.global_batch_size != batch:
        raise DataError(
            f"{sizes} does not match the batch size of {batch} samples per step (all replicas and "
            "gradient_accumulation_steps)."
        )
    wrong = [size for size in sizes.batch_sizes() if size % call]
    if wrong:
        raise DataError(
            f"{sizes}: batch sizes must be multiples of {call}, the samples of one call over all replicas, got "
            f"{wrong[0]}. Lower per_device_train_batch_size and raise gradient_accumulation_steps."
        )


def get_eval_sampler(original: Callable, self: Any, eval_dataset: Any) -> Any:
    """Returns the stock sampler, after checking that the model does not shift pre-shifted labels again."""
    if is_shifted(eval_dataset):
        _require_shifted(self)
    return length_samplers.get_sampler(original, self, eval_dataset)


def _require_shifted(trainer: Any) -> None:
    if not trainer.model_accepts_loss_kwargs:
        raise DataError(
            f"The forward of {type(trainer.model).__name__} takes no shift_labels, so it would shift the already "
            "shifted labels again."
        )
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(trainer.model, peft.PeftModel):
        adapter = trainer.model.active_peft_config
        if adapter.is_prompt_learning and adapter.peft_type != "PREFIX_TUNING":
            raise DataError(
                f"{adapter.peft_type.value}: PEFT extends labels by the prompt, but not labels that are already "
                "shifted. Use another adapter, such as LoRA or prefix tuning."
            )
    if trainer.compute_loss_func is not None:
        raise DataError(
            "compute_loss_func is not supported, because it receives labels that are already shifted. Override "
            "Trainer.compute_loss with a loss that does not shift them."
        )
    if trainer.args.label_smoothing_factor:
        raise DataError(
            f"label_smoothing_factor={trainer.args.label_smoothing_factor} is not supported: Trainer's label smoothing "
            "would shift the already shifted labels again."
        )


def _reported(checkpoint: Any) -> tuple[int, int | None]:
    """Returns the steps and the consumed samples recorded in a checkpoint; `None` samples if not recorded."""
    path = None if checkpoint is None else Path(checkpoint, TRAINER_STATE_NAME)
    if path is None or not path.is_file():
        return 0, None
    state = TrainerState.load_from_json(str(path))
    callback_states: Any = state.stateful_callbacks
    callback_state = callback_states.get(SamplesCallback.__name__) or {}
    return state.global_step, callback_state.get("attributes", {}).get("consumed")


def set_signature_columns(original: Callable, self: Any) -> None:
    """Keeps the column of pre-shifted labels, without which a model would shift labels again."""
    original(self)
    if self.model_accepts_loss_kwargs and _SHIFTED not in self._signature_columns:
        self._signature_columns.append(_SHIFTED)
