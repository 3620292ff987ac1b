"""GLM: per-head norms missing in transformers' plan, and sparse attention indices that later layers reuse."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import SPARSE_INDEXER, TypeFacts, register_facts

_LINEAR = "linear_attention"


@register_model("glm_moe_dsa")
def glm_moe_dsa(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        full_sequence_blocks=("layers.*.self_attn",),
        # Hidden states and the token indices that later layers reuse.
        layer_num_outputs=2,
    )


@register_model("glm5_next_text")
def glm5_next_text(model: Any) -> ModelSpec:
    linear = [f"layers.{index}.self_attn" for index, kind in enumerate(model.config.layer_types) if kind == _LINEAR]
    return corrected_spec(
        model,
        # transformers shards only the output linear of a delta net, whose heads are not sharded.
        {f"{block}.o_proj": "replicated" for block in linear},
        pointwise_containers=("layers.*.attn_hc", "layers.*.ffn_hc"),
        full_sequence_blocks=("layers.*.self_attn",),
        layer_num_outputs=2,
    )


@register_model("glm4_moe")
@register_model("sarvam_moe")
def glm4_moe(model: Any) -> ModelSpec:
    # Per-head norms: all heads share one weight and each rank has some of the heads, so gradients are all-reduced.
    norms = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm") if model.config.use_qk_norm else ()
    return corrected_spec(model, dict.fromkeys(norms, "replicated_with_grad_allreduce"))


register_facts(
    "glm4v_text",
    "glm4v_moe_text",
    "glm_ocr_text",
    "glm46v_text",
    "glmga_text",
    facts=TypeFacts(
        defaults={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}},
    ),
)
register_facts(
    "glmasr_encoder",
    facts=TypeFacts(
        # Width of four concatenated neighboring frames.
        tiny={"intermediate_size": 256},
    ),
)
register_facts(
    "glm5_next_text",
    facts=TypeFacts(
        no_gradient=SPARSE_INDEXER,
    ),
)
register_facts(
    "glm_moe_dsa",
    facts=TypeFacts(
        # Every third layer selects the tokens for itself and the next two layers.
        variants=[{"indexer_types": ["full", "shared", "shared"] * 26}],
        no_gradient=SPARSE_INDEXER,
    ),
)
register_facts(
    "glm",
    facts=TypeFacts(
        variants=[{"attention_bias": False}, {"attention_bias": True}],
    ),
)
register_facts(
    "glm4",
    facts=TypeFacts(
        variants=[{"attention_bias": True}],
    ),
)
register_facts(
    "glm4_moe",
    facts=TypeFacts(
        variants=[{"use_qk_norm": True}, {"attention_bias": True}],
    ),
)
