"""One denominator for the microbatches of a batch.

Each microbatch's loss is `sum / (N w)` with N the targets of the whole batch and w the microbatch's share of its rows;
the model's total is multiplied by w. Token losses add up to the mean over the batch, and what a model adds to its loss
(router losses) to the mean over microbatches.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import ParallelMesh
from .microbatches import IGNORE_INDEX


class Denominator:
    """What the loss of the microbatch under way is divided by."""

    def __init__(self) -> None:
        self.value: Tensor | float | None = None
        self.was_used = False


def count_targets(arguments: dict[str, Any], shifts: bool) -> Tensor:
    """The number of targets of a batch that count."""
    labels = arguments.get("shift_labels")
    if labels is None:
        labels = arguments["labels"]
        labels = labels[..., 1:] if shifts else labels
    return (labels != arguments.get("ignore_index", IGNORE_INDEX)).sum()


def batch_denominator(arguments: dict[str, Any], shifts: bool, mesh: ParallelMesh, all_ranks: bool) -> Tensor:
    """N of a batch: its targets, or with `all_ranks` those of all dp ranks over their number."""
    targets = count_targets(arguments, shifts).float()
    if all_ranks and mesh.dp_size > 1:
        dist.all_reduce(targets, group=mesh.dp_group)
        targets /= mesh.dp_size
    # Without any target the loss is 0 and adds nothing.
    return targets if targets > 0 else torch.ones_like(targets)


def over_denominator(loss_function: Callable[..., Tensor], denominator: Denominator) -> Callable[..., Tensor]:
    """Wraps a transformers token loss so that it divides by `denominator`, whatever it is called with."""

    @functools.wraps(loss_function)
    def function(*args: Any, **kwargs: Any) -> Tensor:
        if denominator.value is None:
            return loss_function(*args, **kwargs)
        denominator.was_used = True
        return loss_function(*args, **{**kwargs, "num_items_in_batch": denominator.value})

    return function
