"""DBRX: a fused projection with grouped key/value heads, and expert weights that are concatenated along dim 0."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_KEYS = ("num_key_value_heads", "head_dim")
ATTENTION = HeadBlock(
    ("num_heads", "num_key_value_heads", "hidden_size"),
    {"Wqkv.weight": (0, (("num_heads", "head_dim"), _KEYS, _KEYS)), "out_proj.weight": (1, ())},
)


@register_model("dbrx")
def dbrx(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        experts={"blocks.*.ffn.experts": "num_experts"},
        head_sharded_blocks={"blocks.*.norm_attn_norm.attn": ATTENTION},
        pointwise_containers=("blocks.*.norm_attn_norm",),
    )


register_facts(
    "dbrx",
    facts=TypeFacts(
        # The default has no RoPE base, but the attention reads it.
        defaults={
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 90, "hidden_size": 6144, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
)
