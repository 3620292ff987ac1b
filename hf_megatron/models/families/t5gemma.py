"""T5Gemma: the final norms of encoder and decoder are defined before their layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("t5gemma")
def t5gemma(model: Any) -> ModelSpec:
    return corrected_spec(model, after_layers=("encoder.norm", "decoder.norm"))
