"""MiniMax: lightning attention with per-head decay constants and one norm over all heads."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import SPARSE_INDEXER, TypeFacts, register_facts

_FIRST = 0, ()
_SECOND = 1, ()
LIGHTNING = HeadBlock(
    ("num_attention_heads",),
    {
        # The fused projection is grouped by head.
        "qkv_proj.weight": _FIRST,
        "slope_rate": _FIRST,
        "query_decay": _FIRST,
        "key_decay": _FIRST,
        "diagonal_decay": _SECOND,
        "norm.weight": _FIRST,
        "output_gate.weight": _FIRST,
        "out_proj.weight": _SECOND,
    },
    norms=("norm",),
)


@register_model("minimax")
def minimax(model: Any) -> ModelSpec:
    return corrected_spec(model, head_sharded_blocks={"layers.*.self_attn": LIGHTNING})


register_facts(
    "minimax_m3_vl_text",
    facts=TypeFacts(
        # The default has no sparse attention and no dense MLP.
        defaults={
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 30,
            "mlp_layer_types": ["dense"] + ["sparse"] * 59,
        },
        no_gradient=SPARSE_INDEXER,
    ),
)
