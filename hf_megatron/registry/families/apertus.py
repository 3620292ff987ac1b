"""Apertus: the activation has two learned scalars, which see this rank's part of the intermediate features."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("apertus")
def apertus(model: Any) -> ModelSpec:
    return corrected_spec(model, {"layers.*.mlp.act_fn": "replicated_sum"})
