"""The denominator of a loss over data parallel ranks: the targets of all of them.

Gradients are averaged over the dp ranks. A mean over each rank's own targets would weigh a token by its neighbours;
here every rank contributes `sum of its losses x dp / targets of all ranks`, so that the average is one process's mean
over the whole batch. With `num_items_in_batch` the caller has counted already, dp included.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import ParallelMesh


class _MeanOverRanks(torch.autograd.Function):
    """`[sum, targets]` of each rank -> the mean over all ranks' targets, the same number on every rank."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, targets: Tensor, mesh: ParallelMesh) -> Tensor:
        both = torch.stack([total, targets.to(total.dtype)])
        dist.all_reduce(both, group=mesh.dp_group)
        # A batch without any target has the loss 0 and adds nothing; one process divides by zero.
        targets_of_all = both[1].clamp(min=1)
        ctx.factor = mesh.dp_size / targets_of_all
        return both[0] / targets_of_all

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None


def mean_over_ranks(loss_function: Callable[..., Tensor], *, shift: bool, mesh: ParallelMesh) -> Callable[..., Tensor]:
    """Wraps a transformers token loss so that its mean runs over the targets of all dp ranks while training.

    Evaluation keeps each rank's own mean, as stock loops expect: they gather the losses of the ranks' batches, and
    not every rank need evaluate.
    """

    @functools.wraps(loss_function)
    def function(
        logits: Any,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        call = functools.partial(
            loss_function, logits=logits, labels=labels, vocab_size=vocab_size, ignore_index=ignore_index, **kwargs
        )
        if shift_labels is not None:
            call = functools.partial(call, shift_labels=shift_labels)
        if num_items_in_batch is not None or not torch.is_grad_enabled():
            return call(num_items_in_batch=num_items_in_batch)
        targets = shift_labels
        if targets is None:
            assert labels is not None
            targets = labels[..., 1:] if shift else labels
        return _MeanOverRanks.apply(call(num_items_in_batch=1), (targets != ignore_index).sum(), mesh)

    return function
