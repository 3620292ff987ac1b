"""ZAYA: convolutions over queries and keys, and values from the current and the previous token, inside attention.

One linear projects the first half of the values and another one the second half, so that heads cannot be sharded in the
usual way; attention is replicated.
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
        # Each adds two tensors per token.
        pointwise_containers=tuple(f"layers.*.post_{block}_residual_scale" for block in ("attention", "mlp")),
        full_sequence_blocks=("layers.*.self_attn",),
        before_layers=tuple(f"{base_prefix(model)}input_hidden_states_{name}" for name in ("scale", "bias")),
        # Hidden states and router states for later layers.
        layer_num_outputs=2,
    )
