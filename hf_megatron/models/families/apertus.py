"""Apertus: two learned scalars of the activation see local features only, so their gradients are all-reduced."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("apertus")
@register_model("apertus1p5_text")
def apertus(model: Any) -> ModelSpec:
    return corrected_spec(model, {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"})
