"""Cohere's transcription: what widens the encoder's output for the decoder is defined behind the decoder's layers."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("cohere_asr")
def cohere_asr(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.proj",))
