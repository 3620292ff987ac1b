"""GPT-NeoX Japanese: the last layer itself adds its attention's bias to the hidden states."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("gpt_neox_japanese")
def gpt_neox_japanese(model: Any) -> ModelSpec:
    return corrected_spec(model, layer_parameters=(f"{base_prefix(model)}layers.*.attention.dense_bias",))
