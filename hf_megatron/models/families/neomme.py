"""NeoMME: a value embedding for two layers, and a per-head coefficient of the exclusive self-attention."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("neomme")
def neomme(model: Any) -> ModelSpec:
    attention = "layers.*.self_attn"
    corrections = {
        "value_embeddings.weight": "shard_dim_-1",
        f"{attention}.exclusive_self_attention.alpha": "shard_dim_0",
    }
    prefix = base_prefix(model)
    return corrected_spec(
        model,
        corrections,
        # Not a uniform block: in addition to the block's input it reads the attention output of the local heads.
        multi_input_blocks=(f"{prefix}{attention}.output_projection",),
        regions={f"{prefix}{attention}": f"{prefix}{attention}.output_projection.o_proj"},
        per_token_arguments=("initial_hidden_states",),
        before_layers=("value_embeddings",),
        pre_layer_arguments=("initial_hidden_states", "value_embeds"),
    )
