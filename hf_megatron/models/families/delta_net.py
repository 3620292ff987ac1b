"""Gated delta nets (Qwen3-Next, 3.5 and 4, OLMo hybrid): values, gates and states are independent per key head."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec

COUNTS = ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim")
MIXED = (("key_dim",), ("key_dim",), ("value_dim",))
ROWS = 0, ()
COMMON = {"conv1d.weight": (0, MIXED), "dt_bias": ROWS, "A_log": ROWS}
BLOCK = "layers.*.linear_attn"
OF_QWEN3_5 = HeadBlock(
    COUNTS,
    COMMON
    | {f"in_proj_{name}.weight": ROWS for name in "zba"}
    | {"in_proj_qkv.weight": (0, MIXED), "out_proj.weight": (1, ())},
)


@register_model("qwen3_next")
def qwen3_next(model: Any) -> ModelSpec:
    # Both fused projections are grouped by key head, so a plain split along dim 0 shards heads.
    weights = COMMON | {"in_proj_qkvz.weight": ROWS, "in_proj_ba.weight": ROWS, "out_proj.weight": (1, ())}
    return corrected_spec(model, head_sharded_blocks={BLOCK: HeadBlock(COUNTS, weights)})


@register_model("qwen3_5_text")
@register_model("qwen3_5_moe_text")
def qwen3_5_text(model: Any) -> ModelSpec:
    return corrected_spec(model, head_sharded_blocks={BLOCK: OF_QWEN3_5})


@register_model("olmo_hybrid")
def olmo_hybrid(model: Any) -> ModelSpec:
    weights = COMMON | {f"{name}_proj.weight": ROWS for name in "qkvabg"} | {"o_proj.weight": (1, ())}
    return corrected_spec(model, head_sharded_blocks={BLOCK: HeadBlock(COUNTS, weights)})
