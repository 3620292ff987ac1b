"""LFM2 and LFM3: attention and MLPs are sharded, short convolutions are replicated."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec, gated_decoder_plan
from ..type_facts import TypeFacts, register_facts

_MLP: dict[str, Any] = {"block": "feed_forward", "mlp": ("w1", "w3", "w2")}


@register_model("lfm2")
def lfm2(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan(output="out_proj", norms=("q_layernorm", "k_layernorm"), **_MLP))


@register_model("lfm3")
def lfm3(model: Any) -> ModelSpec:
    gate = {"layers.*.self_attn.g_proj": "colwise"} if model.config.use_attention_gate else {}
    return family_spec(model, gated_decoder_plan(norms=("q_norm", "k_norm"), **_MLP) | gate)


register_facts(
    "lfm2_vl",
    facts=TypeFacts(
        # The default has a pooling head that is not used.
        defaults={"vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False}},
    ),
)
register_facts(
    "lfm2",
    "lfm2_moe",
    facts=TypeFacts(
        # The default has no layer types.
        defaults={"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    ),
)
