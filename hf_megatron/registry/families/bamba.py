"""Bamba: its layers return what attention weighs, too."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("bamba")
def bamba(model: Any) -> ModelSpec:
    return corrected_spec(model, layer_values=2)
