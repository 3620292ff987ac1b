"""ZAYA: queries and keys of neighbouring tokens meet in convolutions, values in a delayed half, inside of attention."""

from typing import Any

from ...spec import ModelSpec
from ..family import base_prefix
from ..lookup import register_model


@register_model("zaya")
def zaya(model: Any) -> ModelSpec:
    return ModelSpec(
        "zaya",
        no_sequence_parallel="transformers has no tensor parallel plan of its layers.",
        whole_blocks=(f"{base_prefix(model)}layers.*.self_attn",),
    )
