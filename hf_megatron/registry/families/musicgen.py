"""MusicGen's decoder: its cross attention reads a prompt that is no part of a row."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("musicgen_decoder")
def musicgen_decoder(model: Any) -> ModelSpec:
    return corrected_spec(model, no_context_parallel="the ranks of a row cannot share out the tokens of its prompt.")
