"""Mistral Large 4: layers read token indices, keys and values of earlier ones."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("mistral_large4_text")
def mistral_large4_text(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        whole_blocks=("layers.*.self_attn",),
        layer_values=2,
        layer_containers=("shared_kv_states",),
    )
