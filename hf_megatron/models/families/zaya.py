"""ZAYA: queries and keys of neighbouring tokens meet in convolutions, values in a delayed half, inside of attention.

Half of the values are the heads before the others: of two heads no rank can have its own, and attention is whole.
"""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec


@register_model("zaya")
def zaya(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "embed_tokens": "embedding_rowwise",
            "layers.*.mlp.experts": "partial_sum",
            "layers.*.mlp.experts.gate_up_proj": "packed_dim_-2",
            "layers.*.mlp.experts.down_proj": "shard_dim_-1",
        },
        # They add two tensors per token.
        pointwise_containers=tuple(f"layers.*.post_{block}_residual_scale" for block in ("attention", "mlp")),
        full_sequence_blocks=("layers.*.self_attn",),
        before_layers=tuple(f"{base_prefix(model)}input_hidden_states_{name}" for name in ("scale", "bias")),
        # What routers of later layers read.
        layer_num_outputs=2,
    )
