"""BLT: bytes are cut into patches between stacks of layers, and patches and bytes read each other there."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("blt")
def blt(model: Any) -> ModelSpec:
    # Those of bytes stay whole: between their layers patches read them.
    return corrected_spec(model, layer_stacks=(f"{base_prefix(model)}global_transformer.layers",))
