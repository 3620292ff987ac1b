"""T5Gemma 2: decoder attention reads decoder and encoder states in one block."""

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
        # The default has a pooling head that is not used.
        defaults={
            "vision_config": {
                **{"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
                "vision_use_head": False,
            },
        },
    ),
)
