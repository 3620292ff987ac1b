"""Molmo 2: text layers of Qwen3, or of OLMo, whose norms look at all heads together."""

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
        # Counted from the end, as a tower of any number of layers has them.
        defaults={"vision_feature_layer": [-1, -2]},
    ),
)
