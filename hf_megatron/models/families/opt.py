"""OPT: the MLP's linears are children of the layer and read `[batch * sequence, hidden]`."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("opt")
def opt(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "decoder.embed_tokens": "vocab_embedding",
            "decoder.layers.*.self_attn.q_proj": "column",
            "decoder.layers.*.self_attn.k_proj": "column",
            "decoder.layers.*.self_attn.v_proj": "column",
            "decoder.layers.*.self_attn.out_proj": "row",
            "decoder.layers.*.fc1": "column",
            "decoder.layers.*.fc2": "row",
        },
        local_attributes={"decoder.layers.*.self_attn": ("num_heads",)},
        regions={"decoder.layers.*.fc1": "decoder.layers.*.fc2"},
        after_layers=("decoder.final_layer_norm", "decoder.project_out"),
    )
