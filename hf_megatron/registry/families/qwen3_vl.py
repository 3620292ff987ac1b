"""Qwen3-VL: its dense text layers, of which transformers' plan has none, are those of Qwen3."""

from typing import Any

from ...spec import ModelSpec
from ..family import family_spec
from ..lookup import register_model


@register_model("qwen3_vl_text")
def qwen3_vl_text(model: Any) -> ModelSpec:
    column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return family_spec(
        model,
        {
            "embed_tokens": "vocab_embedding",
            **{f"layers.*.{name}": "column" for name in column},
            # Their weights are those of one head, and each rank computes with some of the heads.
            "layers.*.self_attn.q_norm": "replicated_sum",
            "layers.*.self_attn.k_norm": "replicated_sum",
            "layers.*.self_attn.o_proj": "row",
            "layers.*.mlp.down_proj": "row",
        },
    )
