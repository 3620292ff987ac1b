"""LUKE: its layers compute entities beside words, and hand both on."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("luke")
def luke(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        layer_num_outputs=2,
        no_sequence_parallel="its layers put words and entities into one sequence, of pieces of which there is none.",
    )
