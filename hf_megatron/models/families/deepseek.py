"""DeepSeek: V4's hyper-connections are pointwise over tokens, so they run on sequence shards."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import SPARSE_INDEXER, TypeFacts, register_facts


@register_model("deepseek_v4")
def deepseek_v4(model: Any) -> ModelSpec:
    return corrected_spec(
        model, pointwise_containers=("layers.*.attn_hc", "layers.*.ffn_hc"), sequence_dims={"input_ids": 1}
    )


register_facts(
    "deepseek_v2",
    facts=TypeFacts(
        # The default has no number of experts per token.
        defaults={"num_experts_per_tok": 2},
        # V2-Lite; V2, with its group-limited router and with a greedy one.
        variants=[
            {"q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 6},
            {
                "first_k_dense_replace": 1,
                "topk_method": "group_limited_greedy",
                "n_group": 8,
                "topk_group": 3,
                "num_experts_per_tok": 6,
            },
            {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
        ],
    ),
)
register_facts(
    "deepseek_ocr2_text",
    facts=TypeFacts(
        # The default has no MLP layer types and no number of experts per token.
        defaults={"mlp_layer_types": ["dense"] + ["sparse"] * 31, "num_experts_per_tok": 6},
    ),
)
register_facts(
    "deepseek_v32",
    "deepseek_v4",
    facts=TypeFacts(
        no_gradient=SPARSE_INDEXER,
    ),
)
register_facts(
    "deepseek_ocr2_vision",
    facts=TypeFacts(
        no_gradient={r"\.query_1024_resolution\.": "makes features of larger images: compared on small ones"},
    ),
)
register_facts(
    "deepseek_v3",
    facts=TypeFacts(
        variants=[{"q_lora_rank": None, "n_group": 1, "topk_group": 1}, {"rope_interleave": False}],
    ),
)
