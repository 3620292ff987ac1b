"""Outputs of a pipelined model and their autograd nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..compat.torch_autograd import is_reached
from ..compat.transformers_models import CACHE_OUTPUT
from ..core.unavailable_output import UnavailableOutput
from ..errors import UnsupportedError
from ..losses.batch_loss import BatchLoss
from ..losses.targets import target_names

# Outputs of state space models, RWKV and XLNet in addition to logits.
STATES = ("state", "mems") if CACHE_OUTPUT == "cache" else ("cache_params", "state", "mems")


@dataclass
class _Values(ModelOutput):
    """Output of a pipelined model, identical on every rank of the pipeline.

    Logits are not available in training with labels.

    Args:
        loss (`Tensor`, *optional*): a scalar.
        aux_loss (`Tensor`, *optional*): a scalar, the mean over microbatches.
        logits (`Tensor`, *optional*): `[batch, sequence, vocab]`, or `[batch, classes]`.
        start_logits (`Tensor`, *optional*), end_logits (`Tensor`, *optional*): `[batch, sequence]`.
        prediction_logits (`Tensor`, *optional*): `[batch, sequence, vocab]`.
        seq_relationship_logits (`Tensor`, *optional*): `[batch, 2]`.
        last_hidden_state (`Tensor`, *optional*): `[batch, sequence, hidden]`, for base models.
        pooler_output (`Tensor`, *optional*): `[batch, hidden]`, for base models with a pooler.
        cache (`Cache`, *optional*): keys and values of this rank's layers only; `past_key_values` until transformers
            5.23.
    """

    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Any = None
    start_logits: Any = None
    end_logits: Any = None
    prediction_logits: Any = None
    seq_relationship_logits: Any = None
    last_hidden_state: Any = None
    pooler_output: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "encoder_last_hidden_state":
            raise _OffStageOutputError(
                f"outputs.{name} of a pipelined model is available on one stage only. Call model.get_encoder() under "
                "torch.no_grad(), which returns it on every rank, or load the model with pp_size=1."
            )
        if name in STATES:
            raise _OffStageOutputError(
                f"outputs.{name} of a pipelined model: each stage has the states of its own layers. Load the model "
                "with pp_size=1."
            )
        raise _OffStageOutputError(
            f"{type(self).__name__!r} object has no attribute {name!r}: a pipelined model returns "
            f"{', '.join(VALUES_OF_ROWS)} and losses. Load the model with pp_size=1."
        )


if CACHE_OUTPUT == "cache":

    @dataclass
    class PipelineOutput(_Values):
        __doc__ = _Values.__doc__
        cache: Any = None

else:

    @dataclass
    class PipelineOutput(_Values):  # type: ignore[no-redef]
        __doc__ = _Values.__doc__
        past_key_values: Any = None


class _OffStageOutputError(UnsupportedError, AttributeError):
    """Access to an output that is not on every stage; `hasattr` returns False."""


# Fields `[batch, ...]`, in the order of transformers' output classes.
VALUES_OF_ROWS = (
    *("logits", "start_logits", "end_logits", "prediction_logits", "seq_relationship_logits"),
    *("last_hidden_state", "pooler_output"),
)


class UnavailableLogits(UnavailableOutput):
    """Placeholder for logits that were not kept."""

    message = (
        "A pipelined model has no logits in a training step with labels: its backward has run already. Call it "
        "without labels to compute your own loss from its logits."
    )


# Gradients of inputs, and the gradients that autograd has to add to each parameter.
Gradients = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]


class Backward(Protocol):
    """Backward of the values that a pipeline returned."""

    def __call__(self, gradients: tuple[Tensor, ...], /, *, accumulates: bool, wants_weights: bool) -> Gradients:
        """Computes gradients of inputs and parameters from the gradients of the values.

        Args:
            accumulates (`bool`): whether the backward adds to `.grad` of the leaves instead of returning gradients.
            wants_weights (`bool`): whether gradients of parameters are needed.
        """


class PipelineValues(torch.autograd.Function):
    """Autograd node of the last stage's values on every rank; a `Backward` computes the gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, backward: Backward, values: int, inputs: int, *tensors: Tensor) -> Any:
        """Returns the first `values` tensors, `[batch, ...]` or scalars.

        Args:
            anchor (`Tensor`): leaf of this call; only a full `backward()` reaches it.
            backward (`Backward`): computes the gradients.
            values (`int`), inputs (`int`): number of tensors that are values, and inputs; the others are parameters.
        """
        ctx.run, ctx.values, ctx.inputs = backward, values, inputs
        return tuple(value.clone() for value in tensors[:values])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of inputs and parameters from gradients of the values, `[batch, ...]` or scalars."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the gradients of a pipelined model cannot be differentiated again. Load it "
                "without megatron_config."
            )
        anchor, weights = ctx.next_functions[0], ctx.next_functions[1 + ctx.values + ctx.inputs :]
        # `loss.backward()` reaches the anchor; `torch.autograd.grad` and `backward(inputs=...)` do not.
        accumulates = is_reached(anchor)
        # A frozen parameter may be listed because it keeps a gradient; it has no edge in the graph.
        wants_weights = accumulates or any(is_reached(edge) for edge in weights if edge[0] is not None)
        inputs, parameters = ctx.run(gradients, accumulates=accumulates, wants_weights=wants_weights)
        return (torch.zeros(0), None, None, None, *(None for _ in range(ctx.values)), *inputs, *parameters)


def with_backward(
    backward: Backward, values: tuple[Tensor, ...], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns values, `[batch, ...]` or scalars, with a node that connects them to inputs and parameters.

    Inputs and parameters may have any shape.
    """
    anchor = torch.zeros(0, requires_grad=True)
    return PipelineValues.apply(anchor, backward, len(values), len(inputs), *values, *inputs, *parameters)


class ReportedPart(torch.autograd.Function):
    """Autograd node of a loss term that is returned in addition to the loss; its backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, name: str, value: Tensor) -> Tensor:
        """Returns the value, a scalar."""
        ctx.name = name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Raises `UnsupportedError`."""
        raise UnsupportedError(
            f"outputs.{ctx.name} of a pipelined model in training is included in outputs.loss and cannot be "
            "backpropagated separately. Weight it in the model's config (router_aux_loss_coef), or load the model with "
            "pp_size=1."
        )


def reported(name: str, value: Tensor) -> Tensor:
    """Returns a loss term, a scalar, whose backward raises because its gradient is part of the loss's."""
    return ReportedPart.apply(torch.zeros(0, requires_grad=True), name, value)


def read_loss(output: Any, model: Any, loss: BatchLoss, arguments: Mapping[str, Any]) -> Tensor:
    """Returns the loss, a scalar, from the last stage's output for a microbatch."""
    names = target_names(arguments)
    if unknown := [name for name in names if name not in loss.used]:
        raise UnsupportedError(
            f"{type(model).__name__} computes its loss of {', '.join(unknown)} itself, averaged over the targets of "
            "each microbatch. With pipeline parallelism, call it without labels and compute the loss from its logits."
        )
    if not isinstance(output.get("loss"), Tensor):
        raise UnsupportedError(f"{type(model).__name__} returns no loss for {', '.join(names)} only.")
    return output["loss"]


def read_sample_outputs(output: Any, model: Any) -> dict[str, Tensor]:
    """Returns logits or hidden states, `[batch, ...]` each, of the last stage's output, by field name."""
    values = {name: output[name] for name in VALUES_OF_ROWS if output.get(name) is not None}
    if not values:
        raise UnsupportedError(
            f"{type(model).__name__} returns no output that a pipeline supports: {', '.join(VALUES_OF_ROWS)}, losses."
        )
    return {name: value if isinstance(value, Tensor) else value.gather(warn=False) for name, value in values.items()}
