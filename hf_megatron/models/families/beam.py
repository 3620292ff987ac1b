"""Beam: layers get a factor per token beside the rotary positions, `[1, 1, sequence, 1]`."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("beam")
def beam(model: Any) -> ModelSpec:
    return corrected_spec(model, sequence_dims={"attention_scaling": 2})
