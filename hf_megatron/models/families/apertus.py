"""Apertus: the activation has two learned scalars, which see this rank's part of the intermediate features."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("apertus")
def apertus(model: Any) -> ModelSpec:
    return corrected_spec(model, {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"})
