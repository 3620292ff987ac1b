"""OPT: the MLP's linears are children of the layer and read `[batch * sequence, hidden]`."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("opt")
def opt(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "decoder.embed_tokens": "embedding_rowwise",
            "decoder.layers.*.self_attn.q_proj": "colwise",
            "decoder.layers.*.self_attn.k_proj": "colwise",
            "decoder.layers.*.self_attn.v_proj": "colwise",
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        },
        local_attributes={"decoder.layers.*.self_attn": ("num_heads",)},
        regions={"decoder.layers.*.fc1": "decoder.layers.*.fc2"},
        after_layers=("decoder.final_layer_norm", "decoder.project_out"),
    )


register_facts(
    "opt",
    facts=TypeFacts(
        # OPT-350M; Galactica; checkpoints without a final norm.
        variants=[
            {"do_layer_norm_before": False, "word_embed_proj_dim": 512},
            {"enable_bias": False, "layer_norm_elementwise_affine": False},
            {"_remove_final_layer_norm": True},
        ],
    ),
)
