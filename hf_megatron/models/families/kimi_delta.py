"""Kimi delta attention (Kimi Linear, Bailing hybrid): gated delta nets with per-channel gates."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec

COUNTS = ("num_heads", "qkv_dim", "conv_dim")
ROWS = 0, ()
BLOCK = "layers.*.self_attn"
COMMON = {f"{name}_proj.weight": ROWS for name in "qkvb"} | {
    "conv1d.weight": (0, (("qkv_dim",),) * 3),
    "forget_gate.dt_bias": ROWS,
    "o_proj.weight": (1, ()),
}


@register_model("kimi_linear")
def kimi_linear(model: Any) -> ModelSpec:
    # The low-rank input linears of the two gates are replicated: all heads read their output.
    weights = COMMON | {"forget_gate.f_b_proj.weight": ROWS, "g_b_proj.weight": ROWS, "forget_gate.A_log": (2, ())}
    return corrected_spec(model, head_sharded_blocks={BLOCK: HeadBlock(COUNTS, weights)})


@register_model("bailing_hybrid")
def bailing_hybrid(model: Any) -> ModelSpec:
    weights = COMMON | {"forget_gate.f_proj.weight": ROWS, "g_proj.weight": ROWS, "forget_gate.A_log": ROWS}
    counts = (*COUNTS, "forget_gate.num_heads")
    return corrected_spec(model, head_sharded_blocks={BLOCK: HeadBlock(counts, weights)})
