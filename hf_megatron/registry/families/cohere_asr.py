"""Cohere's speech recognition: its decoder defines behind its layers what it runs before them."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("cohere_asr")
def cohere_asr(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.pos_emb",), behind_encoder=("decoder.proj",))
