"""Losses that a model's class computes inline: their means are normalized over the global batch.

If the batch is split over ranks or microbatches, a model is called with labels of a tensor subclass. It propagates
through the few functions that models apply to labels, and intercepts torch's loss functions: instead of the mean over
the present entries they return the sum over these, divided by the number in the batch (`BatchLoss`). Nothing upstream
is patched, and other calls of these functions are not affected.

Losses that cannot be normalized this way are rejected: those that sum their terms themselves, or compare the samples of
a batch.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..compat.shard_safe import is_from_checked_library, is_marked
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError
from .batch_loss import BatchLoss
from .loss_terms import subtract_terms
from .router_losses import attach_router_losses
from .targets import LABELS, get_codebook_name, is_target, scalar

# Methods and functions whose result is still labels.
_METHODS = (
    "__getitem__ chunk clamp clone contiguous cpu cuda detach double expand fill_ flatten float int long masked_fill "
    "narrow permute reshape select split squeeze to transpose type type_as unbind unsqueeze view view_as"
)
_FUNCTIONS = (
    "chunk clamp flatten full_like masked_fill reshape split squeeze transpose unbind unsqueeze where zeros_like"
)
_FOLLOWED = {
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    F.pad,
}


def _classes(values: Mapping[str, Any]) -> Tensor:
    """Returns the denominator of a mean over targets: class ids `[...]`, or class probabilities `[..., classes]`."""
    target, weight = values["target"], values.get("weight")
    # Class probabilities, [batch, classes, ...]: one term per prediction.
    if target.is_floating_point():
        logits = values["input"]
        return scalar(target.numel() // logits.shape[1 if target.dim() > 1 else 0], target.device)
    # With class weights the mean is divided by the weights of the targets.
    counts = target != values["ignore_index"]
    return counts.sum() if weight is None else (weight[target.masked_fill(~counts, 0)] * counts).sum()


def _entries(values: Mapping[str, Any]) -> Tensor:
    shape = torch.broadcast_shapes(values["input"].shape, values["target"].shape)
    return scalar(shape.numel(), values["target"].device)


def _divergences(values: Mapping[str, Any]) -> Tensor:
    if values["reduction"] == "batchmean":
        return scalar(values["input"].shape[0], values["target"].device)
    return _entries(values)


# Dims of labels `[batch, sequence, codebooks]`.
_WITH_CODEBOOKS = 3

# Loss function -> function that counts the denominator of its mean.
_MEANS: Mapping[Callable[..., Tensor], Callable[[Mapping[str, Any]], Tensor]] = {
    F.cross_entropy: _classes,
    F.nll_loss: _classes,
    F.binary_cross_entropy: _entries,
    F.binary_cross_entropy_with_logits: _entries,
    F.mse_loss: _entries,
    F.l1_loss: _entries,
    F.smooth_l1_loss: _entries,
    F.huber_loss: _entries,
    F.kl_div: _divergences,
}


class BatchLabels(Tensor):
    """Labels of any shape with the `BatchLoss` of their batch and the name of their argument."""

    batch: BatchLoss
    argument: str
    # Whether a model's class computes the loss, so that sums over its own samples have to be rejected.
    in_model = True

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls a function with plain tensors; a loss returns the batch's mean."""
        kwargs = kwargs or {}
        labels = [value for value in (*args, *kwargs.values()) if isinstance(value, cls)]
        # Plain tensors inside: the function must not dispatch to this handler again.
        args, kwargs = tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}
        if function in _MEANS and labels:
            return _mean(labels[0].batch, labels[0].argument, function, args, kwargs, in_model=cls.in_model)
        result = function(*args, **kwargs)
        # A result with more dims than the labels has room for several copies of them; one of the same shape is an input
        # of a decoder.
        is_room = function is Tensor.new_zeros and labels and result.dim() > labels[0].dim()
        if not labels or not (function in _FOLLOWED or is_room):
            return result
        return know_batch(result, labels[0].batch, _name_of(function, labels[0], args), kind=cls)


def _name_of(function: Any, labels: BatchLabels, args: tuple) -> str:
    """Returns the target name of what a function selects from labels `[batch, sequence, codebooks]`."""
    if function is Tensor.__getitem__ and type(args[1]) is tuple:
        match args[1]:
            case (EllipsisType(), int(book)) if labels.dim() == _WITH_CODEBOOKS:
                return get_codebook_name(labels.argument, book % labels.shape[-1])
    return labels.argument


def know_batch(value: Any, batch: BatchLoss, name: str = "labels", kind: type[BatchLabels] = BatchLabels) -> Any:
    """Attaches a batch to labels of any shape, also in tuples; `name` is the argument's name, `kind` the class."""
    if isinstance(value, tuple | list):
        return type(value)(know_batch(item, batch, name, kind) for item in value)
    if type(value) is not Tensor:
        return value
    labels = value.as_subclass(kind)
    labels.batch, labels.argument = batch, "labels" if name in LABELS else name
    return labels


def with_known_targets(arguments: Mapping[str, Any], batch: BatchLoss) -> dict[str, Any]:
    """Returns a call's arguments by name, with the batch attached to targets."""
    return {name: know_batch(value, batch, name) if is_target(name) else value for name, value in arguments.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, BatchLabels):
        return value.as_subclass(Tensor)
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


@cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def _mean(
    batch: BatchLoss,
    argument: str,
    function: Callable[..., Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    in_model: bool = True,
) -> Tensor:
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    values = bound.arguments
    deprecated = values.get("size_average") is not None or values.get("reduce") is not None
    if deprecated or values["reduction"] not in ("mean", "batchmean"):
        if not in_model:
            return function(**values)
        if values["reduction"] == "sum" and batch.has_caller_count and batch.microbatch_denominators is None:
            # transformers' own losses divide this sum by the caller's count.
            return batch.record_share(function(**values) / batch.take_caller_denominator(1))
        raise UnsupportedError(
            f"torch.nn.functional.{function.__name__}(reduction={values['reduction']!r}) inside a model's forward: the "
            "model would divide it by this rank's count only. Call the model without labels and compute the loss from "
            "its outputs, or use dp_size=1 and pp_size=1."
        )
    # Local number of terms, a scalar; `mean` sums it over the ranks of the batch.
    terms = _MEANS[function](values)
    if isinstance(values["input"], Tensor) and values["input"].dtype in (torch.float16, torch.bfloat16):
        # A sum needs more precision than a mean.
        values["input"] = values["input"].float()
    values["reduction"] = "sum"
    # Local sum of the loss terms.
    total = function(**values)
    return batch.mean(total, terms, name=argument)


class MeansOfBatch(TorchFunctionMode):
    """Normalizes every mean of a loss over its batch, for labels that cannot be a subclass, such as fake tensors.

    Args:
        batch: of the model's calls.
    """

    def __init__(self, batch: BatchLoss):
        super().__init__()
        self.batch = batch

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls a function; a loss returns the batch's mean."""
        kwargs = kwargs or {}
        in_batch = self.batch.over_ranks or self.batch.microbatch_denominators is not None
        # With a reduction other than mean, the caller does the division.
        if function not in _MEANS or not in_batch or kwargs.get("reduction", "mean") != "mean":
            return function(*args, **kwargs)
        return _mean(self.batch, "labels", function, args, kwargs)


class _PlainGradient(torch.autograd.Function):
    """Identity of a loss; its backward accepts the DTensor gradient that an added DTensor term causes."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar."""
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient, a scalar that is identical on all ranks."""
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class LossHooks:
    """Model hooks that provide a call's losses with their batch."""

    def __init__(self, batch: BatchLoss, model: nn.Module, *, pipelined: bool, has_dtensors: bool):
        self.batch, self.pipelined, self.has_dtensors = batch, pipelined, has_dtensors
        self.signature = inspect.signature(type(model).forward)
        self.leaving: list[Callable[[], None]] = []
        self.takes_loss = False

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the functions in a model's table of hooks."""
        hooks.add("loss", self._enter, self._leave, always_exit=True)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        batch = self.batch
        bound = self.signature.bind_partial(model, *args)
        arguments = {**bound.arguments, **kwargs}
        # `terms` counts the losses that were normalized in this call; none means that the loss was missed.
        batch.has_caller_count, batch.terms = arguments.get("num_items_in_batch") is not None, 0
        self.takes_loss = any(is_target(name) and value is not None for name, value in arguments.items())
        self.leaving.append(attach_router_losses(batch, arguments))
        if self.takes_loss and (batch.over_ranks or self.pipelined):
            _require_known_loss(model)
        if not batch.over_ranks:
            return args, kwargs
        if arguments.get("return_loss"):
            raise UnsupportedError(
                f"{type(model).__name__}(return_loss=True): its loss compares all samples of a batch with each other, "
                "but each data-parallel rank has only some of them. Call it without return_loss, and compute the loss "
                "from its outputs."
            )
        if self.pipelined:
            # The stages are called with microbatches, whose labels carry the batch.
            return args, kwargs
        names = list(bound.arguments)[1:]
        args = (
            tuple(
                know_batch(value, batch, name) if is_target(name) else value
                for name, value in zip(names, args, strict=False)
            )
            + args[len(names) :]
        )
        return args, with_known_targets(kwargs, batch)

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        batch = self.batch
        if self.leaving:
            self.leaving.pop()()
        output = self._with_plain_gradient(output)
        has_caller_count, over_ranks, terms = batch.has_caller_count, batch.over_ranks, batch.terms
        batch.has_caller_count = False
        loss = get_output_loss(output, takes_loss=self.takes_loss)
        # A pipeline normalizes the losses of its microbatches itself.
        if loss is None or not over_ranks or (self.pipelined and not terms):
            return output
        if not terms and loss.requires_grad:
            raise UnsupportedError(
                f"{type(model).__name__} computes its loss in a way that cannot be normalized over all data-parallel "
                "ranks. Call it without labels and compute the loss from its outputs, or use dp_size=1."
            )
        if batch.shares is not None and not self.pipelined:
            # All other terms are means over all ranks, and equal on them.
            batch.rest = subtract_terms(loss, batch.shares)[0]
        # The caller multiplies by the number of ranks.
        return with_loss(output, loss / batch.mesh.dp_size) if has_caller_count else output

    def _with_plain_gradient(self, output: Any) -> Any:
        loss = get_output_loss(output, takes_loss=self.takes_loss)
        if not self.has_dtensors or loss is None or not loss.requires_grad or torch.compiler.is_compiling():
            return output
        return with_loss(output, _PlainGradient.apply(loss))


def _require_known_loss(model: Any) -> None:
    """Raises `UnsupportedError` for a user-defined loss function, which would see a part of the batch only."""
    function = model.loss_function
    if not (is_marked(function) or is_from_checked_library(function)):
        raise UnsupportedError(
            f"{type(model).__name__}.loss_function is not one of transformers' loss functions: each data-parallel "
            "rank, or each pipeline microbatch, would call it with a part of the batch. Mark it with "
            "hf_megatron.shard_safe if it returns just the mean of a torch loss over the labels. Otherwise call the "
            "model without labels and compute the loss from its outputs."
        )


def get_output_loss(output: Any, *, takes_loss: bool) -> Tensor | None:
    """Returns the loss, a scalar, in a model's output; in a tuple it is the first entry if `takes_loss`."""
    value = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(output, tuple) and takes_loss:
        value = output[0]
    return value if isinstance(value, Tensor) and value.dim() == 0 else None


def with_loss(output: Any, loss: Tensor) -> Any:
    """Returns a model's output with another loss, a scalar."""
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output
