"""Llama 4: attention without RoPE counts token positions itself; every expert is called with all tokens."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("llama4_text")
def llama4_text(model: Any) -> ModelSpec:
    # The class with a head contains the base model as `model`, but its `base_model_prefix` does not say so.
    layers = "model.layers.*" if "model" in model._modules else "layers.*"
    return corrected_spec(
        model,
        full_sequence_blocks=(f"{layers}.self_attn",),
        experts={f"{layers}.feed_forward.experts": "num_experts"},
    )


register_facts(
    "llama4_vision_model",
    facts=TypeFacts(
        # The default sizes are inconsistent with each other.
        defaults={"hidden_size": 1408, "vision_output_dim": 4096, "image_size": 336},
    ),
)
