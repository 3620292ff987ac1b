"""Single-process reference measurement of a tiny model, and its round-off error."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from .measure import Measurement, measure
from .tolerances import AMPLIFIED, cancelled, judge
from .unread_parameters import without_gradient


def take_reference(tiny_model: Any, *, norms_are_frozen: bool = False, best: float = math.inf) -> Measurement:
    """Measures a tiny model in this process and estimates the round-off error of the results.

    Args:
        tiny_model (`TinyModel`): saved to disk.
        norms_are_frozen (`bool`): see `measure`.
        best (`float`): smallest round-off of the other draws. Once this draw is known not to be better, its round-off
            is not estimated more precisely.

    Raises:
        ValueError: transformers does not load all weights that it saved.
    """
    # Check the first draw only: all draws have the same parameters.
    if best == math.inf and (unread := _unread_weights(tiny_model)):
        raise ValueError(f"transformers does not load all weights it saved for {tiny_model.class_name}: {unread}")
    model = tiny_model.load()
    # Copy before measuring, which changes buffers and cached values.
    another = copy.deepcopy(model)
    reference = measure(model, tiny_model.batches, norms_are_frozen=norms_are_frozen)
    reference.without = tuple(without_gradient(tiny_model.config, tiny_model.modalities))
    if "quantization_config" in tiny_model.arguments:
        # Quantized weights cannot be measured in fp64.
        return reference
    try:
        in_double = tiny_model.load(experts_implementation="eager").double()
        precise = measure(in_double, list(map(_in_double, tiny_model.batches)), norms_are_frozen=norms_are_frozen)
    except RuntimeError:
        # Some modules are hard-coded to fp32 and fail with fp64 weights.
        known = 0.0
    else:
        precise.without = reference.without
        reference.cancelled = precise.cancelled = cancelled(precise)
        known = judge(reference, precise).worst.value
    if known < best:
        known = max(
            known, judge(_shaken(another, tiny_model.batches, norms_are_frozen), reference).worst.value / AMPLIFIED
        )
    reference.round_off = known
    return reference


def _unread_weights(tiny_model: Any) -> str:
    """Returns a weight that `from_pretrained` initializes randomly instead of loading it, or an empty string."""
    _, loading_info = tiny_model.model_class.from_pretrained(
        tiny_model.directory, **tiny_model.arguments, output_loading_info=True
    )
    return min(loading_info["missing_keys"], default="")


def _in_double(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch in fp64: some encoders require pixels to have the dtype of their weights."""
    return {
        # Some image arguments are lists.
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _shaken(model: Any, batches: list[dict[str, Any]], norms_are_frozen: bool) -> Measurement:
    """Measures a model after perturbing its parameters in place by at most one fp32 rounding step.

    If this changes the results by more than another summation order may, a kink or a tie between experts is near, and
    another summation order may end up on its other side.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + signs * torch.finfo(torch.float32).eps)
    return measure(model, batches, norms_are_frozen=norms_are_frozen)
