"""Exclusion of samples that fill up the last global batch from Trainer's losses, token counts and predictions.

Accelerate gives all ranks batches of equal size and repeats samples from the beginning when the data ends. Stock
Trainer drops them from gathered predictions, but trains on them and includes them in evaluation losses.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import find_batch_size

from ...core.communication.full_tensor import gather_full_tensor
from ...losses.targets import LABELS, mask_all_targets
from ...models.modalities.sample_index import modality_names, multimodal_samples
from ...parallel_state import ParallelState, parallel_state
from ..accelerate.batch_shards import collecting, last_batch_size, read_ahead
from ..accelerate.gathering import EvaluationLoss, gather_evaluated
from .uneven_batches import require_full_batch, takes_any_rows


class EmptyBatch(dict):
    """Inputs of a rank without a sample in the global batch: one sample with masked targets, which counts for nothing.

    The rank still runs its forward and backward, because other ranks may wait for it in collectives.
    """


def divides_batches(trainer: Any) -> bool:
    """Returns whether a trainer's model is split over data-parallel ranks with samples of their own."""
    state = parallel_state(trainer.model)
    return state is not None and state.loss is not None and state.loss.has_data_parallel


def leave_out_empty_batch(
    original: Callable, self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Any:
    """Excludes the placeholder sample of a rank without samples from the loss, `()`."""
    if not isinstance(inputs, EmptyBatch):
        return original(self, model, inputs, num_items_in_batch)
    state = parallel_state(self.model)
    assert state is not None
    with state.loss.without_terms():
        return original(self, model, inputs, num_items_in_batch)


def get_batch_samples(original: Callable, self: Any, *args: Any, **kwargs: Any) -> tuple[list, Any]:
    """Returns the batches of one step without repeated samples, and the number of their targets, `()`."""
    with collecting(self.accelerator.gradient_state):
        batches, count = original(self, *args, **kwargs)
    state = None if self.model is None else parallel_state(self.model)
    if state is None or not batches or not state.loss.has_data_parallel:
        return batches, count
    last = batches[-1]
    read_ahead(self.accelerator.gradient_state, is_ahead=False)
    require_full_batch(self, last)
    # Trainers that generate receive their samples as a list, always of full size.
    if isinstance(last, Mapping) and _counted(self, state, last, self._train_batch_size) != find_batch_size(last):
        batches[-1] = local_samples(self, state, last, self._train_batch_size)
    if last_batch_size(self.accelerator.gradient_state) is not None:
        # Recount with a collective: either all ranks do it or none.
        count = self._get_num_items_in_batch(batches, self.args.device)
    read_ahead(self.accelerator.gradient_state, is_ahead=True)
    return batches, count


def track_num_input_tokens(original: Callable, self: Any, inputs: Any) -> None:
    """Counts no tokens on a rank without a sample in the batch."""
    if isinstance(inputs, EmptyBatch):
        inputs = {name: _first(value, find_batch_size(inputs), 0) for name, value in inputs.items()}
    original(self, inputs)


def sequence_prediction_step(
    original: Callable, self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
) -> Any:
    """Evaluates and generates without repeated samples in a Seq2SeqTrainer."""
    state = None if self.model is None else parallel_state(self.model)
    if state is None or not state.loss.has_data_parallel:
        return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
    if self.gather_function == self.accelerator.gather:
        self.gather_function = functools.partial(gather_evaluated, self.accelerator)
    if not self.args.predict_with_generate or prediction_loss_only:
        # Upstream continues with Trainer's own step, which is patched.
        return original(self, model, inputs, prediction_loss_only, *args, **kwargs)

    def step(rows: Any) -> Any:
        loss, tokens, labels = original(self, model, rows, prediction_loss_only, *args, **kwargs)
        if tokens is not None:
            # Each rank stops generating when its own samples are done, so lengths differ between ranks: pad `[batch,
            # tokens]` before gathering.
            tokens = self.accelerator.pad_across_processes(tokens, dim=1, pad_index=_pad_token(self))
        return loss, tokens, labels

    return evaluated(self, state, inputs, step)


def _pad_token(trainer: Any) -> Any:
    """Returns the token that `generate` writes after finished sequences."""
    arguments = vars(trainer).get("_gen_kwargs", {})
    config = arguments.get("generation_config") or trainer.model.generation_config
    pad, end = (arguments.get(name, getattr(config, name)) for name in ("pad_token_id", "eos_token_id"))
    if pad is None and end is not None:
        pad = end[0] if isinstance(end, list) else end
    return 0 if pad is None else pad


def local_samples(trainer: Any, state: ParallelState, inputs: Any, batch_size: int) -> Any:
    """Removes the repeated samples from a rank's batch, or masks their targets."""
    rows, counted = find_batch_size(inputs), _counted(trainer, state, inputs, batch_size)
    if counted == rows:
        return inputs
    if not takes_any_rows(trainer):
        return _mask_targets_after(inputs, counted)
    count, config = max(counted, 1), trainer.model.config
    modalities = modality_names(inputs, config)
    kept = {name: _first(value, rows, count) for name, value in inputs.items() if name not in modalities}
    kept |= multimodal_samples(inputs, slice(0, count), config) if modalities else {}
    return kept if counted else EmptyBatch(mask_all_targets(kept))


def evaluated(trainer: Any, state: ParallelState, inputs: Any, step: Callable[[Any], Any]) -> Any:
    """Returns the loss `()` over all ranks' samples, with predictions and labels in the shapes of the batch.

    The last prediction is repeated for samples that were removed; Trainer drops these when it gathers.

    Args:
        step: function from inputs to loss, predictions and labels.
    """
    if not state.loss.has_data_parallel:
        return step(inputs)
    rows = find_batch_size(inputs)
    inputs = local_samples(trainer, state, inputs, trainer.args.eval_batch_size)
    kept = find_batch_size(inputs)
    with state.loss.normalizing_over_ranks(counts=not isinstance(inputs, EmptyBatch)):
        loss, *predictions = step(inputs)
    if loss is not None:
        # With `num_items_in_batch` each rank returns its share of the loss, but Trainer weights ranks by batch size:
        # average over the ranks here, so that all have the same loss.
        loss = gather_full_tensor(loss) if isinstance(loss, DTensor) else loss.clone()
        state.loss.average_over_ranks_(loss)
        loss = loss.as_subclass(EvaluationLoss)
    return loss, *(_filled_up(prediction, kept, rows) for prediction in predictions)


def _counted(trainer: Any, state: ParallelState, inputs: Any, batch_size: int) -> Any:
    """Returns how many samples of this rank's current batch are not repeated; they come first."""
    rows, of_all_ranks = find_batch_size(inputs), last_batch_size(trainer.accelerator.gradient_state)
    # With collators that concatenate samples, or other batch sizes, it is unknown which samples are repeated.
    if of_all_ranks is None or rows != batch_size:
        return rows
    return min(max(of_all_ranks - state.mesh.dp_rank * batch_size, 0), batch_size)


def _mask_targets_after(inputs: Any, count: Any) -> Any:
    """Masks the targets `[batch, sequence]` after the first `count` samples.

    Per-sample class labels are left alone: they have no ignore value.
    """
    nothing = mask_all_targets(inputs)
    names = [name for name in LABELS if isinstance(inputs.get(name), Tensor) and inputs[name].dim() > 1]
    if not names:
        return inputs
    ignored = dict(inputs) | {name: torch.cat([inputs[name][:count], nothing[name][count:]]) for name in names}
    return ignored if count else EmptyBatch(ignored)


def _first(value: Any, rows: int, count: int) -> Any:
    return _mapped(value, lambda tensor: tensor[:count] if tensor.shape[0] == rows else tensor)


def _filled_up(value: Any, count: Any, rows: Any) -> Any:
    def fill(tensor: Tensor) -> Tensor:
        if tensor.shape[0] != count:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(rows - count, *tensor.shape[1:])])

    return value if count == rows else _mapped(value, fill)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.dim() else value
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
