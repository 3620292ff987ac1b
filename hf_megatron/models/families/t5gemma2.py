"""T5Gemma 2: attention of its decoder reads its own hidden states and the encoder's output in one block."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("t5gemma2")
def t5gemma2(model: Any) -> ModelSpec:
    return corrected_spec(model, multi_input_blocks=(f"{base_prefix(model)}decoder.layers.*.self_attn",))


register_facts(
    "t5gemma2_encoder",
    facts=TypeFacts(
        # A head by default that nobody reads.
        defaults={
            "vision_config": {
                **{"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
                "vision_use_head": False,
            },
        },
    ),
)
