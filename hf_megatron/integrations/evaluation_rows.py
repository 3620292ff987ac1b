"""The rows that fill up the last batch of an evaluation, which count for nothing.

Accelerate gives all data parallel ranks batches of one size and takes rows from the beginning where the data end. Stock
Trainer drops them from predictions when it gathers these, but not from the loss of the batch that they are in.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..loss import without_targets
from ..parallel_state import ParallelState


def without_repeated_rows(trainer: Any, state: ParallelState, inputs: Any, step: Callable[[Any], Any]) -> Any:
    """Returns the loss `()` of all ranks' rows that count, and predictions and labels in the shapes of the batch.

    What stands for repeated rows there is dropped by Trainer when it gathers.

    Args:
        step: makes loss, predictions and labels of inputs.
    """
    from transformers.trainer_pt_utils import find_batch_size

    assert state.loss is not None
    if not state.loss.is_spread:
        return step(inputs)
    rows = find_batch_size(inputs)
    counted = _counted(trainer, state, rows)
    # A rank without any row goes on with the others, who may wait for it.
    kept = rows if counted == rows else max(counted, 1)
    if kept != rows:
        inputs = {name: _first(value, rows, kept) for name, value in inputs.items()}
    with state.loss.together(counts=counted != 0):
        loss, *predictions = step(without_targets(inputs) if counted == 0 else inputs)
    if loss is not None:
        # Where the targets were counted a rank has its share of the loss, and Trainer weighs ranks by their rows.
        loss = loss.clone()
        state.loss.mean_over_ranks(loss)
    return loss, *(_filled_up(prediction, kept, rows) for prediction in predictions)


def _counted(trainer: Any, state: ParallelState, rows: Any) -> Any:
    """Counts the rows of this rank's batch under way that are no repetitions; they come first."""
    progress, batch_size = trainer.accelerator.gradient_state, trainer.args.eval_batch_size
    # Collators that join rows, and loaders of other sizes, leave it open which rows are repeated.
    if not progress.end_of_dataloader or progress.remainder <= 0 or rows != batch_size:
        return rows
    return min(max(progress.remainder - state.mesh.dp_rank * batch_size, 0), batch_size)


def _first(value: Any, rows: int, count: int) -> Any:
    return _mapped(value, lambda tensor: tensor[:count] if tensor.shape[0] == rows else tensor)


def _filled_up(value: Any, count: int, rows: int) -> Any:
    def fill(tensor: Tensor) -> Tensor:
        if tensor.shape[0] != count or count == rows:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(rows - count, *tensor.shape[1:])])

    return _mapped(value, fill)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.dim() else value
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
