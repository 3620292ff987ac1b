"""NeoMME: a second table gives two layers values of all heads, and each head takes a share of its own out of them."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("neomme")
def neomme(model: Any) -> ModelSpec:
    attention = "layers.*.self_attn"
    corrections = {
        "value_embeddings.weight": "split_columns",
        f"{attention}.exclusive_self_attention.alpha": "split_first",
    }
    prefix = base_prefix(model)
    return corrected_spec(
        model,
        corrections,
        # No block by itself: what it reads beside the input are heads of this rank.
        several_inputs=(f"{prefix}{attention}.output_projection",),
        regions={f"{prefix}{attention}": f"{prefix}{attention}.output_projection.o_proj"},
        sequence_arguments=("initial_hidden_states",),
        before_layers=("value_embeddings",),
        early_arguments=("initial_hidden_states", "value_embeds"),
    )
