"""Voxtral Realtime: audio features are added to the tokens of the sample; all stages need their length."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec

_PARTS = ("audio_tower", "multi_modal_projector")


@register_model("voxtral_realtime")
def voxtral_realtime(model: Any) -> ModelSpec:
    return corrected_spec(model, prefix_modules=tuple(base_prefix(model) + name for name in _PARTS))
