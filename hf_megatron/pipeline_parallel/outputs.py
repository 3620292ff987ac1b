"""What a pipelined model returns, and the autograd nodes behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..compat.torch_autograd import is_reached
from ..core.unavailable_output import UnavailableOutput
from ..errors import UnsupportedError
from ..losses.batch_loss import BatchLoss
from ..losses.targets import target_names

# What state space models, RWKV and XLNet return beside logits.
_STATES = ("cache_params", "state", "mems")


@dataclass
class PipelineOutput(ModelOutput):
    """What a pipelined model returns, the same on every rank.

    Logits are not there in training with labels.

    Args:
        loss (`Tensor`, *optional*): a scalar.
        aux_loss (`Tensor`, *optional*): a scalar, the mean over microbatches.
        logits (`Tensor`, *optional*): `[batch, sequence, vocab]`, or `[batch, classes]`.
        start_logits (`Tensor`, *optional*), end_logits (`Tensor`, *optional*): `[batch, sequence]`.
        prediction_logits (`Tensor`, *optional*): `[batch, sequence, vocab]`.
        seq_relationship_logits (`Tensor`, *optional*): `[batch, 2]`.
        last_hidden_state (`Tensor`, *optional*): `[batch, sequence, hidden]`, of a base model.
        pooler_output (`Tensor`, *optional*): `[batch, hidden]`, of a base model that has a pooler.
        past_key_values (`Cache`, *optional*): with the keys and values of this rank's layers.
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
    past_key_values: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "encoder_last_hidden_state":
            raise _OffStageOutputError(
                f"outputs.{name} of a pipelined model: one of its stages has it. Call model.get_encoder() under "
                "torch.no_grad(), which returns it on every rank, or load the model with pp_size=1."
            )
        if name in _STATES:
            raise _OffStageOutputError(
                f"outputs.{name} of a pipelined model: each stage has the states of its own layers. Load the model "
                "with pp_size=1."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class _OffStageOutputError(UnsupportedError, AttributeError):
    """An output that one stage has; `hasattr` answers no."""


# Fields with a row per sample, in the order of classes' own outputs.
VALUES_OF_ROWS = (
    *("logits", "start_logits", "end_logits", "prediction_logits", "seq_relationship_logits"),
    *("last_hidden_state", "pooler_output"),
)


class UnavailableLogits(UnavailableOutput):
    """Stands where logits were not kept."""

    message = (
        "A pipelined model has no logits in a training step with labels: its backward is over already. Call it "
        "without labels to get logits that a loss of your own can be computed from."
    )


# Of inputs, and what autograd has to add to each parameter.
Gradients = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]


class Backward(Protocol):
    """What stands behind values that a pipeline returned."""

    def __call__(self, gradients: tuple[Tensor, ...], /, *, accumulates: bool, wants_weights: bool) -> Gradients:
        """Takes the gradients of the values.

        Args:
            accumulates (`bool`): the backward adds to `.grad` of what it reaches; else it returns gradients.
            wants_weights (`bool`): whether it asks for those of parameters.
        """


class PipelineValues(torch.autograd.Function):
    """Values of the last stage on every rank; inputs and parameters get their gradients from what is handed in."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, backward: Backward, values: int, inputs: int, *tensors: Tensor) -> Any:
        """Returns the first tensors, `[rows, ...]` or scalars, as the last stage made them.

        Args:
            anchor (`Tensor`): a leaf of this call alone, which tells backward what it is asked for.
            backward (`Backward`): does the work.
            values (`int`), inputs (`int`): how many of the tensors are values, and how many inputs; parameters follow.
        """
        ctx.run, ctx.values, ctx.inputs = backward, values, inputs
        return tuple(value.clone() for value in tensors[:values])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Takes the gradients of values `[rows, ...]` or scalars."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the gradients of a pipelined model cannot be differentiated again. Load it with "
                "pp_size=1."
            )
        anchor, weights = ctx.next_functions[0], ctx.next_functions[1 + ctx.values + ctx.inputs :]
        # `loss.backward()` reaches everything; what was asked for less has to name what it wants.
        accumulates = is_reached(anchor)
        # A frozen parameter may keep a gradient, and has no edge.
        wants_weights = accumulates or any(is_reached(edge) for edge in weights if edge[0] is not None)
        inputs, parameters = ctx.run(gradients, accumulates=accumulates, wants_weights=wants_weights)
        return (torch.zeros(0), None, None, None, *(None for _ in range(ctx.values)), *inputs, *parameters)


def with_backward(
    backward: Backward, values: tuple[Tensor, ...], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gives values, `[rows, ...]` or scalars, a node that inputs and parameters of any shape get gradients from."""
    anchor = torch.zeros(0, requires_grad=True)
    return PipelineValues.apply(anchor, backward, len(values), len(inputs), *values, *inputs, *parameters)


class ReportedPart(torch.autograd.Function):
    """A part of the loss that is returned beside it, without a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, name: str, value: Tensor) -> Tensor:
        """Returns the value, a scalar."""
        ctx.name = name
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Refuses the gradient of the scalar."""
        raise UnsupportedError(
            f"outputs.{ctx.name} of a pipelined model in training is part of outputs.loss and cannot be backpropagated "
            "by itself. Weigh it by the model's config (router_aux_loss_coef), or load the model with pp_size=1."
        )


def reported(name: str, value: Tensor) -> Tensor:
    """Makes a part of the loss, a scalar, say in backward that it has none of its own."""
    return ReportedPart.apply(torch.zeros(0, requires_grad=True), name, value)


def read_loss(output: Any, model: Any, loss: BatchLoss, arguments: Mapping[str, Any]) -> Tensor:
    """Reads the loss, a scalar, of what the last stage returned for a microbatch's arguments."""
    names = target_names(arguments)
    if unknown := [name for name in names if name not in loss.used]:
        raise UnsupportedError(
            f"{type(model).__name__} computes its loss of {', '.join(unknown)} itself, each microbatch's by its own "
            "targets; with a pipeline call it without labels and compute the loss from its logits."
        )
    if not isinstance(output.get("loss"), Tensor):
        raise UnsupportedError(f"{type(model).__name__} returns no loss of {', '.join(names)} alone.")
    return output["loss"]


def read_sample_outputs(output: Any, model: Any) -> dict[str, Tensor]:
    """Reads logits or hidden states, `[rows, ...]` each, of what the last stage returned, by their fields' names."""
    found = {name: output[name] for name in VALUES_OF_ROWS if output.get(name) is not None}
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} returns nothing that a pipeline hands out: {', '.join(VALUES_OF_ROWS)}, losses."
        )
    return {name: value if isinstance(value, Tensor) else value.gather(warn=False) for name, value in found.items()}
