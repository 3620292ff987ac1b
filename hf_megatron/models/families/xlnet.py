"""XLNet: MLPs are sharded; attention, which contains its residual and norm, is replicated."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("xlnet")
def xlnet(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {"word_embedding": "embedding_rowwise", "layer.*.ff.layer_1": "colwise", "layer.*.ff.layer_2": "rowwise"},
        regions={"layer.*.ff.layer_1": "layer.*.ff.layer_2"},
        before_layers=(f"{base_prefix(model)}mask_emb",),
        # The content stream and the query stream (permutation language modeling).
        layer_num_outputs=2,
        pointwise_containers=("layer.*.ff",),
        sequence_dim=0,
        hidden_state_recorder="cache_mem",
        unshardable_arguments={
            "output_g": "target_mapping of XLNet is not supported: the predicted tokens are not tokens of the "
            "sequence, which is sharded between layers."
        },
    )


register_facts(
    "xlnet",
    facts=TypeFacts(
        tiny={"d_inner": 256},
        no_gradient={
            r"\.mask_emb$": "stands for tokens that are predicted in an order: compared without one",
            r"\.(seg_embed|r_s_bias)$": "reads segments: compared on one",
        },
    ),
)
