"""A twin's numbers in one process, and how sure they are."""

import copy
import math
from typing import Any

import torch
import transformers
from torch import Tensor

from .measure import Measurement, measure
from .tolerances import AMPLIFIED, cancelled, judge
from .unread_parameters import without_gradient


def take_reference(tiny_model: Any, *, norms_are_frozen: bool = False, best: float = math.inf) -> Measurement:
    """Measures a twin in this process, and how far round-off takes its numbers.

    Args:
        twin (`TinyModel`): saved to disk.
        norms_are_frozen (`bool`): see `measure`.
        best (`float`): round-off of another draw; what is known to be no smaller is told no closer.

    Raises:
        ValueError: transformers does not read all of the twin back.
    """
    # Other draws of the same parameters are read alike.
    if best == math.inf and (unread := _unread_weights(tiny_model)):
        raise ValueError(f"transformers does not read back what it wrote of a {tiny_model.class_name}: {unread}")
    model = tiny_model.load()
    # Buffers and what a forward caches change as it is measured.
    another = copy.deepcopy(model)
    reference = measure(model, tiny_model.batches, norms_are_frozen=norms_are_frozen)
    reference.without = tuple(without_gradient(tiny_model.config, tiny_model.modalities))
    if "quantization_config" in tiny_model.arguments:
        # What codes stand for has one precision.
        return reference
    try:
        in_double = tiny_model.load(experts_implementation="eager").double()
        precise = measure(in_double, list(map(_in_double, tiny_model.batches)), norms_are_frozen=norms_are_frozen)
    except RuntimeError:
        # Parts of the model compute in fp32 by name and refuse weights of another type.
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
    """Names a weight that transformers draws anew instead of reading it: no two models would be alike."""
    cls = getattr(transformers, tiny_model.class_name)
    _, found = cls.from_pretrained(tiny_model.directory, **tiny_model.arguments, output_loading_info=True)
    return min(found["missing_keys"], default="")


def _in_double(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch for a model in fp64: not every tower takes pixels of another type than its weights."""
    return {
        # Some forms of images are said by lists of numbers.
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _shaken(model: Any, batches: list[dict[str, Any]], norms_are_frozen: bool) -> Measurement:
    """Measures a model with parameters that are off by a rounding, and leaves them so.

    Where that changes more than other orders of sums may, a kink or a tie between experts is near, and an order may
    fall on its other side.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + signs * torch.finfo(torch.float32).eps)
    return measure(model, batches, norms_are_frozen=norms_are_frozen)
