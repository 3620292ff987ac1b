"""Phi-4 multimodal: the image and audio embedding module passes the token embeddings through if there are neither."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("phi4_multimodal")
def phi4_multimodal(model: Any) -> ModelSpec:
    name = "embed_tokens_extend"
    return corrected_spec(model, before_layers=(name,), run_on_all_stages=(f"{base_prefix(model)}{name}",))


register_facts(
    "phi4_multimodal_audio",
    facts=TypeFacts(
        # The 16 input features after three strided convolutions.
        tiny={"nemo_final_size": 2, "depthwise_separable_out_channel": 64},
    ),
)
register_facts(
    "phi4_multimodal",
    facts=TypeFacts(
        no_gradient={r"\.embed_tokens_extend\.": "reads images and audio: compared on text alone"},
    ),
)
