"""Llama 4: layers without rotary positions count tokens inside of attention; each expert is given all tokens."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("llama4_text")
def llama4_text(model: Any) -> ModelSpec:
    # Seen from this class the base model is no prefix.
    return corrected_spec(
        model,
        whole_blocks=("model.layers.*.self_attn",),
        experts={"model.layers.*.feed_forward.experts": "num_experts"},
    )
