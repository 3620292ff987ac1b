"""Molmo 2: language model layers of Qwen3 with per-head norms, or of OLMo with norms over all heads."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec, gated_decoder_plan
from ..type_facts import TypeFacts, register_facts


@register_model("molmo2_text")
def molmo2_text(model: Any) -> ModelSpec:
    norms = ("q_norm", "k_norm")
    if model.config.qk_norm_type == "qwen3":
        return family_spec(model, gated_decoder_plan(norms=norms))
    joined = {f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
    return family_spec(model, gated_decoder_plan() | joined | {"layers.*.self_attn.o_proj": "rowwise_split_input"})


register_facts(
    "molmo2_adapter",
    facts=TypeFacts(
        # Negative indices are valid for an encoder with any number of layers.
        defaults={"vision_feature_layer": [-1, -2]},
    ),
)
