"""Granite 4 Vision: Granite layers; the layer loop adds image features to the hidden states before some of them."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("granite4_vision_text")
def granite4_vision_text(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        no_sequence_parallel="its layer loop adds image features to full-sequence hidden states between layers.",
    )
