"""GPT-J: attention and MLP share one norm; the attention reads its head count from `num_attention_heads`."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("gptj")
def gptj(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "wte": "embedding_rowwise",
            "h.*.attn.q_proj": "colwise",
            "h.*.attn.k_proj": "colwise",
            "h.*.attn.v_proj": "colwise",
            "h.*.attn.out_proj": "rowwise",
            "h.*.mlp.fc_in": "colwise",
            "h.*.mlp.fc_out": "rowwise",
        },
        local_attributes={"h.*.attn": ("num_attention_heads",)},
    )
