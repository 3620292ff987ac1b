"""Beam: layers get a scaling factor per token, `[1, 1, sequence, 1]`, in addition to rotary positions."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("beam")
def beam(model: Any) -> ModelSpec:
    return corrected_spec(model, sequence_dims={"attention_scaling": 2})
