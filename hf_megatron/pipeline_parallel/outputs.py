"""What a pipelined model returns, and the autograd nodes behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..errors import UnsupportedError


@dataclass
class PipelineOutput(ModelOutput):
    """What a pipelined model returns, the same on every rank.

    Args:
        loss (`Tensor`, *optional*): a scalar.
        logits (`Tensor`, *optional*): `[batch, sequence, vocab]`; not there in training with labels.
        aux_loss (`Tensor`, *optional*): a scalar, the mean over microbatches.
        past_key_values (`Cache`, *optional*): with the keys and values of this rank's layers.
    """

    loss: Tensor | None = None
    logits: Any = None
    past_key_values: Any = None
    aux_loss: Tensor | None = None


class AbsentLogits:
    """Stands where logits were not kept; says so when somebody reads it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dtype", "to", "is_nested_tensor"):
            raise AttributeError(name)
        raise UnsupportedError(
            "A pipelined model has no logits in a training step with labels: its backward is over already. Call it "
            "without labels to get logits that a loss of your own can be computed from."
        )


class ScheduledLoss(torch.autograd.Function):
    """A loss whose gradients exist already; its backward says how much they count."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, settle: Callable[[float], None]) -> Tensor:
        """Returns the loss, a scalar."""
        ctx.settle = settle
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Takes how much the loss, a scalar, counts."""
        ctx.settle(gradient.item())
        return torch.zeros_like(gradient), None, None


class KeptGraphs(torch.autograd.Function):
    """Values of the last stage on every rank; their backward runs the pipeline in reverse."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, backward: Callable[[tuple[Tensor, ...]], None], *values: Tensor) -> Any:
        """Returns values `[rows, ...]` or scalars, as the last stage made them."""
        ctx.run = backward
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Takes the gradients of values `[rows, ...]` or scalars."""
        ctx.run(gradients)
        return (torch.zeros(()), *(None for _ in range(len(gradients) + 1)))
