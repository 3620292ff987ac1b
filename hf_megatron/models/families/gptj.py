"""GPT-J: attention and MLP read one norm; heads are counted by `num_attention_heads`."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("gptj")
def gptj(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "wte": "vocab_embedding",
            "h.*.attn.q_proj": "column",
            "h.*.attn.k_proj": "column",
            "h.*.attn.v_proj": "column",
            "h.*.attn.out_proj": "row",
            "h.*.mlp.fc_in": "column",
            "h.*.mlp.fc_out": "row",
        },
        local_attributes={"h.*.attn": ("num_attention_heads",)},
    )
