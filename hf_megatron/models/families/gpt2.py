"""GPT-2: query, key and value are three blocks of one `Conv1D`, whose weight is transposed."""

from typing import Any

from ...errors import UnsupportedError
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("gpt2")
def gpt2(model: Any) -> ModelSpec:
    if model.config.add_cross_attention:
        raise UnsupportedError("gpt2 with add_cross_attention=True: no parity check covers its cross attention.")
    return family_spec(
        model,
        {
            "wte": "embedding_rowwise",
            "h.*.attn.c_attn": "fused_qkv",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        local_attributes={"h.*.attn": ("num_heads", "split_size")},
    )


register_facts(
    "gpt2",
    facts=TypeFacts(
        variants=[
            {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
            {"scale_attn_weights": False},
        ],
    ),
)
