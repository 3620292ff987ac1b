"""gpt-oss: attention sinks per head; experts with interleaved gate and up columns and a bias inside the sum."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("gpt_oss")
def gpt_oss(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "embed_tokens": "vocab_embedding",
            "layers.*.self_attn.q_proj": "column",
            "layers.*.self_attn.k_proj": "column",
            "layers.*.self_attn.v_proj": "column",
            "layers.*.self_attn.o_proj": "row",
            "layers.*.self_attn.sinks": "split_rows",
            "layers.*.mlp.experts": "partial_sum",
            "layers.*.mlp.experts.gate_up_proj": "split_columns",
            "layers.*.mlp.experts.gate_up_proj_bias": "split_columns",
            "layers.*.mlp.experts.down_proj": "split_rows",
            "layers.*.mlp.experts.down_proj_bias": "shared_addend",
        },
        # A pair of gate and up columns stays on one rank only if tp divides the width.
        local_attributes={"layers.*.mlp.experts": ("intermediate_size",)},
    )
