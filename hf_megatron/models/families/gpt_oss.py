"""gpt-oss: per-head attention sinks; experts with interleaved gate and up columns and a bias in the partial sum."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("gpt_oss")
def gpt_oss(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "embed_tokens": "embedding_rowwise",
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.self_attn.sinks": "shard_dim_-2",
            "layers.*.mlp.experts": "partial_sum",
            "layers.*.mlp.experts.gate_up_proj": "shard_dim_-1",
            "layers.*.mlp.experts.gate_up_proj_bias": "shard_dim_-1",
            "layers.*.mlp.experts.down_proj": "shard_dim_-2",
            "layers.*.mlp.experts.down_proj_bias": "shared_bias",
        },
        # Requires tp_size to divide the width: otherwise a pair of gate and up columns could be on two ranks.
        local_attributes={"layers.*.mlp.experts": ("intermediate_size",)},
    )
