"""Funnel: the encoder shortens the sequence between layers, and the decoder reads states of several lengths."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("funnel")
def funnel(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        no_sequence_parallel="its layers read queries, keys and values of different lengths.",
        no_pipeline=(
            "its decoder reads the hidden states of an early layer and of the last layer, which have different lengths."
        ),
    )
