"""DBRX: fewer heads of keys and values in one projection, and experts with their weights one below the other."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec

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
