"""CodeGen: the fused projection holds query, value and key blocks for each quarter of the heads in turn."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts

_HEADS = ("num_attention_heads", "head_dim")
ATTENTION = HeadBlock(
    # The forward of transformers 5.24 splits its projections by `embed_dim`; earlier ones do not read it.
    ("num_attention_heads", "embed_dim"),
    {"qkv_proj.weight": (0, (_HEADS,) * 3), "out_proj.weight": (1, (_HEADS,))},
    # Hard-coded in the forward.
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
        # Two heads in each of the four blocks, so that two ranks can share them.
        tiny={"n_head": 8},
    ),
)
