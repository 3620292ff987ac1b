"""Persimmon, the language model of Fuyu: a fused projection grouped by head, and per-head norms."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec


@register_model("persimmon")
def persimmon(model: Any) -> ModelSpec:
    plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.query_key_value": "colwise",
        "layers.*.self_attn.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    }
    if model.config.qk_layernorm:
        plan |= {
            f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce" for norm in ("q_layernorm", "k_layernorm")
        }
    return family_spec(
        model,
        plan,
        local_attributes={"layers.*.self_attn": ("num_heads",)},
        layers=f"{base_prefix(model)}layers",
    )
