"""XLNet: its MLPs are split; attention adds its input before it norms, and is whole."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec


@register_model("xlnet")
def xlnet(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {"word_embedding": "vocab_embedding", "layer.*.ff.layer_1": "column", "layer.*.ff.layer_2": "row"},
        regions={"layer.*.ff.layer_1": "layer.*.ff.layer_2"},
        before_layers=(f"{base_prefix(model)}mask_emb",),
        # Those of tokens that are predicted in an order.
        layer_values=2,
        transparent=("layer.*.ff",),
        token_dim=0,
        keeps_states="cache_mem",
        whole_arguments={
            "output_g": "target_mapping of XLNet: the tokens that it predicts are none of the sequence, which ranks "
            "have parts of between layers."
        },
    )
