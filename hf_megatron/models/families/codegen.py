"""CodeGen: its projection has queries, values and keys of a fourth of the heads, then of the next one, and so on."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts

_HEADS = ("num_attention_heads", "head_dim")
ATTENTION = HeadBlock(
    ("num_attention_heads",),
    {"qkv_proj.weight": (0, (_HEADS,) * 3), "out_proj.weight": (1, (_HEADS,))},
    # Written into its forward.
    interleave_rounds=4,
)


@register_model("codegen")
def codegen(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {"wte": "embedding_rowwise", "h.*.mlp.fc_in": "colwise", "h.*.mlp.fc_out": "rowwise"},
        head_sharded_blocks={f"{base_prefix(model)}h.*.attn": ATTENTION},
    )


register_facts(
    "codegen",
    facts=TypeFacts(
        # Heads of two ranks in four parts.
        tiny={"n_head": 8},
    ),
)
