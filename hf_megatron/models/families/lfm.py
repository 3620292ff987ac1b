"""LFM2 and LFM3: attention and MLPs of layers are split, short convolutions are whole."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec, gated_decoder_plan

_MLP: dict[str, Any] = {"block": "feed_forward", "mlp": ("w1", "w3", "w2")}


@register_model("lfm2")
def lfm2(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan(output="out_proj", norms=("q_layernorm", "k_layernorm"), **_MLP))


@register_model("lfm3")
def lfm3(model: Any) -> ModelSpec:
    gate = {"layers.*.self_attn.g_proj": "colwise"} if model.config.use_attention_gate else {}
    return family_spec(model, gated_decoder_plan(norms=("q_norm", "k_norm"), **_MLP) | gate)
