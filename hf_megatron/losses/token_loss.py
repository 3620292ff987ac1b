"""transformers' losses over a vocabulary, for a batch that is split over ranks or microbatches.

Dense logits are passed to transformers' own function; lazy logits (`tensor_parallel/vocab_parallel_head.py`) compute
the loss themselves.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_autograd import leave_uncompiled
from ..compat.transformers_models import get_loss_function, loss_functions, token_loss_functions, uses_loss_function
from ..errors import UnsupportedError
from .batch_loss import BatchLoss
from .targets import IGNORE_INDEX, resolve_targets


class PendingLogits(Protocol):
    """Logits `[batch, sequence, vocab]` that are not computed yet."""

    def cross_entropy(self, targets: Tensor, *, num_items_in_batch: Any, ignore_index: int) -> Tensor:
        """Returns the summed loss of targets `[batch, sequence]` over `num_items_in_batch`, by default their number."""


class TokenLoss(Shared):
    """Replaces `model.loss_function`, if that is one of transformers' token losses.

    Args:
        original (`Callable`): `ForCausalLMLoss` or `ForMaskedLMLoss`.
        batch (`BatchLoss`): provides the denominator.
    """

    def __init__(self, original: Callable[..., Tensor], batch: BatchLoss):
        functools.update_wrapper(self, original)
        self.original, self.batch = original, batch
        self.shifts = token_loss_functions()[original]

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
        batch = self.batch
        # Plain tensors: the denominator is chosen below, not by `BatchLabels`.
        labels, shift_labels = _plain(labels), _plain(shift_labels)
        targets = resolve_targets(labels, shift_labels, shifts=self.shifts, ignore_index=ignore_index)
        if isinstance(logits, Tensor):
            # [batch, sequence] targets, shifted here once, so that the count below matches the loss.
            label_kwargs = {"labels": labels, "shift_labels": targets} if self.shifts else {"labels": targets}
            kernel = functools.partial(
                self.original, logits=logits, vocab_size=vocab_size, ignore_index=ignore_index, **label_kwargs, **kwargs
            )
        else:
            # Other arguments do not affect the loss: transformers ignores `label_smoothing`, for example.
            kernel = functools.partial(logits.cross_entropy, targets, ignore_index=ignore_index)
        # Microbatch of a pipeline: divide by the batch's number of targets.
        if batch.microbatch_denominators is not None:
            if batch.microbatch_denominators.is_probe:
                # A class may pass labels as `shift_labels`, such as the labels of a decoder with an encoder.
                batch.require_terms((targets != ignore_index).sum(), "labels")
            return kernel(num_items_in_batch=batch.get_microbatch_denominator("labels"))
        # The caller has counted the targets of all ranks.
        if num_items_in_batch is not None:
            return batch.record_share(kernel(num_items_in_batch=batch.take_caller_denominator(num_items_in_batch)))
        # Single batch, or evaluation of this rank's batch: the stock mean.
        if not batch.over_ranks:
            return kernel(num_items_in_batch=None)
        # Sum of the local losses, divided by the number of targets on all ranks.
        return batch.mean(kernel(num_items_in_batch=1), (targets != ignore_index).sum())


def _plain(labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.as_subclass(Tensor)


def install_loss(model: Any, state: Any) -> BatchLoss:
    """Creates the loss normalization of a model, and wraps transformers' token loss with it."""
    kind = model.loss_function
    shifts = loss_functions().get(kind)
    is_token_loss = kind in token_loss_functions()
    config, divides_itself = state.config, is_token_loss and uses_loss_function(model)
    if shifts and not uses_loss_function(model):
        # `loss_function` is not used by an inline loss; the trial forward detects whether labels are shifted.
        shifts = False
    batch = BatchLoss(state.mesh, shifts, divides_itself, config.router_aux_loss_scope, config.router_z_loss_coef)
    if is_token_loss:
        state.patches.replace(model, "loss_function", TokenLoss(kind, batch))
        if kind is get_loss_function(model):
            state.hooks.add("loss function", functools.partial(_require_loss, kind))
    return batch


@leave_uncompiled
def _require_loss(kind: Any, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises `UnsupportedError` if the model's `loss_type` selects another function than when it was loaded."""
    if isinstance(model.loss_function, TokenLoss) and get_loss_function(model) is not kind:
        raise UnsupportedError(
            f"loss_type={model.loss_type!r} selects another loss function than when {type(model).__name__} was loaded. "
            "Assign model.loss_function, or change transformers' LOSS_MAPPING before from_pretrained."
        )
