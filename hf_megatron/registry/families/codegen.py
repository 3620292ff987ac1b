"""CodeGen: its projection has queries, values and keys of a fourth of the heads, then of the next one, and so on."""

from typing import Any

from ...spec import HeadBlock, ModelSpec
from ..family import corrected_spec
from ..lookup import register_model

# In whatever number of parts its first training ran.
_ROUNDS = 4
_HEADS = ("num_attention_heads", "head_dim")
ATTENTION = HeadBlock(
    ("num_attention_heads",),
    {"qkv_proj.weight": (0, (_HEADS,) * 3), "out_proj.weight": (1, (_HEADS,))},
    rounds=_ROUNDS,
)


@register_model("codegen")
def codegen(model: Any) -> ModelSpec:
    spec = corrected_spec(model, head_blocks={"h.*.attn": ATTENTION})
    attention = {name for name in spec.plan if ".attn." in name}
    return corrected_spec(model, dict.fromkeys(attention, "replicated"), head_blocks={"h.*.attn": ATTENTION})
