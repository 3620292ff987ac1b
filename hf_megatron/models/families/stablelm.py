"""StableLM: head counts are attributes; with `qk_layernorm` each head has its own norm weights."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("stablelm")
def stablelm(model: Any) -> ModelSpec:
    plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    if model.config.qk_layernorm:
        for norm in ("q_layernorm", "k_layernorm"):
            plan[f"layers.*.self_attn.{norm}"] = "per_head_norm"
            plan[f"layers.*.self_attn.{norm}.norms.*"] = "replicated_with_grad_allreduce"
    return family_spec(
        model,
        plan,
        local_attributes={"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
    )


register_facts(
    "stablelm",
    facts=TypeFacts(
        # 1.6B; 12B; and its two options separately.
        variants=[
            {"use_qkv_bias": True},
            {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 8},
            {"use_parallel_residual": True},
            {"qk_layernorm": True},
        ],
    ),
)
