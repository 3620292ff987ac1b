"""Persimmon, the text model of Fuyu: query, key and value of a head side by side; each head is normed by itself."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec


@register_model("persimmon")
def persimmon(model: Any) -> ModelSpec:
    plan = {
        "embed_tokens": "vocab_embedding",
        "layers.*.self_attn.query_key_value": "column",
        "layers.*.self_attn.dense": "row",
        "layers.*.mlp.dense_h_to_4h": "column",
        "layers.*.mlp.dense_4h_to_h": "row",
    }
    if model.config.qk_layernorm:
        plan |= {f"layers.*.self_attn.{norm}": "replicated_sum" for norm in ("q_layernorm", "k_layernorm")}
    return family_spec(
        model,
        plan,
        local_attributes={"layers.*.self_attn": ("num_heads",)},
        layers=f"{base_prefix(model)}layers",
    )
