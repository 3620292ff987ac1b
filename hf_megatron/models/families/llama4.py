"""Llama 4: layers without rotary positions count tokens inside of attention; each expert is given all tokens."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("llama4_text")
def llama4_text(model: Any) -> ModelSpec:
    # Seen from the class with a head the base model is no prefix.
    layers = "model.layers.*" if "model" in model._modules else "layers.*"
    return corrected_spec(
        model,
        full_sequence_blocks=(f"{layers}.self_attn",),
        experts={f"{layers}.feed_forward.experts": "num_experts"},
    )


register_facts(
    "llama4_vision_model",
    facts=TypeFacts(
        # Sizes by default that do not follow from each other as those of checkpoints do.
        defaults={"hidden_size": 1408, "vision_output_dim": 4096, "image_size": 336},
    ),
)
