"""Phi-4 multimodal: what embeds images and audio takes the embedded tokens, and hands them on without either."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("phi4_multimodal")
def phi4_multimodal(model: Any) -> ModelSpec:
    name = "embed_tokens_extend"
    return corrected_spec(model, before_layers=(name,), run_on_all_stages=(f"{base_prefix(model)}{name}",))
