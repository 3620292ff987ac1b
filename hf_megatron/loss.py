"""The loss of a model that computes it itself: labels shifted once, one denominator, a mean over axes.

    labels --targets_of--> targets --kernel--> sum over this rank's tokens / denominator --> one number on every rank

The denominator is, in this order: what a pipeline says of the batch whose microbatch is under way;
`num_items_in_batch`, which the caller has counted over all ranks; in training the targets of all ranks that see parts
of one batch (dp x cp); else, in evaluation, this rank's own targets, as stock loops expect: they gather the losses of
the ranks' batches, and not every rank need evaluate.

Gradients are averaged over the dp ranks. A mean over each rank's own targets would weigh a token by its neighbours;
here every rank contributes `sum of its losses x dp / targets of all ranks`, so that the average is one process's mean
over the whole batch.

What turns logits into a sum is handed in: dense logits go to transformers' own function, logits that are no tensor
(`tensor_parallel/logits.py`) know themselves how to be a loss.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .mesh import ParallelMesh
from .patch_ledger import Shared
from .upstream import loss_functions

IGNORE_INDEX = -100
LABELS = ("labels", "shift_labels")


class PendingLogits(Protocol):
    """Logits `[batch, sequence, vocab]` that were not computed yet."""

    def cross_entropy(
        self, targets: Tensor, *, num_items_in_batch: Tensor | int | None, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        """Sums the losses of targets `[batch, sequence]` over `num_items_in_batch`, by default those that count."""


def next_tokens(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shifts labels `[batch, sequence]` to what each position predicts; the last one predicts nothing."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def targets_of(labels: Tensor | None, shift_labels: Tensor | None, *, shifts: bool, ignore_index: int) -> Tensor:
    """Returns what positions `[batch, sequence]` predict: labels shifted by the caller, by us, or not at all."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return next_tokens(labels, ignore_index) if shifts else labels


def has_labels(arguments: Mapping[str, Any]) -> bool:
    """Tells whether a call of a model takes its loss."""
    return any(arguments.get(name) is not None for name in LABELS)


def without_targets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a batch count for nothing."""
    ignored = {name: torch.full_like(arguments[name], IGNORE_INDEX) for name in LABELS if name in arguments}
    return dict(arguments) | ignored


def token_mean(losses: Tensor, counts: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Averages losses `[batch, sequence]` over the tokens that `counts`, of the same shape, has as 1.

    The losses of other tokens are 0; `num_items_in_batch` is the denominator where the caller has counted.
    """
    return losses.sum() / (counts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


class _MeanOverRanks(torch.autograd.Function):
    """`[sum, targets]` of each rank -> the mean over all ranks' targets, the same number on every rank."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, targets: Tensor, group: dist.ProcessGroup, dp_size: int) -> Tensor:
        both = torch.stack([total, targets.to(total.dtype)])
        dist.all_reduce(both, group=group)
        # A batch without any target has the loss 0 and adds nothing; one process divides by zero.
        targets_of_all = both[1].clamp(min=1)
        ctx.factor = dp_size / targets_of_all
        return both[0] / targets_of_all

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient * ctx.factor, None, None, None


class TokenLoss(Shared):
    """Stands in the place of `model.loss_function`, where that is one of transformers' token losses.

    Args:
        original (`Callable`): `ForCausalLMLoss` or `ForMaskedLMLoss`.
        shifts (`bool`): whether its targets are the next tokens.
        mesh (`ParallelMesh`): gives the ranks that see parts of one batch.
    """

    def __init__(self, original: Callable[..., Tensor], shifts: bool, mesh: ParallelMesh):
        functools.update_wrapper(self, original)
        self.original, self.shifts, self.mesh = original, shifts, mesh
        self.was_used = False
        self._denominator: Tensor | float | None = None

    def __call__(
        self,
        logits: "Tensor | PendingLogits",
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        targets = targets_of(labels, shift_labels, shifts=self.shifts, ignore_index=ignore_index)
        if isinstance(logits, Tensor):
            given = {"labels": labels, "shift_labels": targets} if self.shifts else {"labels": targets}
            kernel = functools.partial(
                self.original, logits=logits, vocab_size=vocab_size, ignore_index=ignore_index, **given, **kwargs
            )
        else:
            kernel = functools.partial(
                logits.cross_entropy,
                targets,
                ignore_index=ignore_index,
                label_smoothing=kwargs.get("label_smoothing", 0.0),
            )
        if self._denominator is not None:
            self.was_used = True
            return kernel(num_items_in_batch=self._denominator)
        if num_items_in_batch is not None or not torch.is_grad_enabled() or self.mesh.axes.size("dp_cp") == 1:
            return kernel(num_items_in_batch=num_items_in_batch)
        counted = (targets != ignore_index).sum()
        return _MeanOverRanks.apply(kernel(num_items_in_batch=1), counted, self.mesh.group("dp_cp"), self.mesh.dp_size)

    @contextmanager
    def over(self, denominator: Tensor | float | None) -> Iterator[None]:
        """Has the loss inside divided by this scalar, whatever the model calls it with; sets `was_used` if it is."""
        self.was_used, self._denominator = False, denominator
        try:
            yield
        finally:
            self._denominator = None

    def denominator(self, arguments: Mapping[str, Any], *, over_ranks: bool) -> Tensor:
        """Returns what the sum of a batch's losses is divided by, a scalar: its targets.

        `over_ranks` counts those of all ranks that see parts of one batch, over the number of dp ranks.
        """
        ignore_index = arguments.get("ignore_index", IGNORE_INDEX)
        targets = targets_of(
            arguments.get("labels"), arguments.get("shift_labels"), shifts=self.shifts, ignore_index=ignore_index
        )
        counted = (targets != ignore_index).sum().float()
        if over_ranks and self.mesh.axes.size("dp_cp") > 1:
            dist.all_reduce(counted, group=self.mesh.group("dp_cp"))
            counted /= self.mesh.dp_size
        # Without any target the loss is 0 and adds nothing.
        return torch.where(counted > 0, counted, 1.0)

    def mean_over_ranks(self, loss: Tensor) -> None:
        """Replaces a batch's loss, a scalar, by the mean over all ranks that see parts of it."""
        if self.mesh.axes.size("dp_cp") > 1:
            dist.all_reduce(loss, group=self.mesh.group("dp_cp"))
            loss /= self.mesh.dp_size


def token_loss_of(model: Any, mesh: ParallelMesh) -> TokenLoss | None:
    """Wraps a model's loss function, or returns `None` where that is no token loss of transformers."""
    shifts = loss_functions().get(model.loss_function)
    return None if shifts is None else TokenLoss(model.loss_function, shifts, mesh)
