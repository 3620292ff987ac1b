"""T5Gemma: the final norms of encoder and decoder are defined before their layers."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("t5gemma")
def t5gemma(model: Any) -> ModelSpec:
    return corrected_spec(model, after_layers=("encoder.norm", "decoder.norm"))
