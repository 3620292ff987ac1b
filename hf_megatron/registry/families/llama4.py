"""Llama 4: layers without rotary positions count tokens inside of attention, and scale queries by their places."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("llama4_text")
def llama4_text(model: Any) -> ModelSpec:
    # Seen from this class the base model is no prefix.
    return corrected_spec(model, whole_blocks=("model.layers.*.self_attn",))
