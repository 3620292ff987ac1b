"""HunYuan: dense, MoE and vision-language models; V4 with hyper-connections that are pointwise over tokens."""

from typing import Any

from ..composite import composite_spec
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec, family_spec, gated_decoder_plan
from ..type_facts import SPARSE_INDEXER, TypeFacts, register_facts


@register_model("hy_v4")
def hy_v4(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        pointwise_containers=("layers.*.attn_hc", "layers.*.ffn_hc"),
        full_sequence_blocks=("layers.*.self_attn",),
        # Hidden states and the token indices that later layers reuse.
        layer_num_outputs=2,
    )


@register_model("hunyuan_vl_text")
def hunyuan_vl_text(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan(norms=("query_layernorm", "key_layernorm")))


@register_model("hunyuan_vl")
def hunyuan_vl(model: Any) -> ModelSpec | None:
    reason = "its image positions are counted over all samples of the batch, which a microbatch does not contain."
    spec = composite_spec(model, {"hunyuan_vl_text": hunyuan_vl_text})
    return None if spec is None else spec.updated(no_pipeline=f"{reason} Load it with pp_size=1.")


@register_model("hunyuan_v1_dense")
def hunyuan_v1_dense(model: Any) -> ModelSpec:
    return hunyuan_vl_text(model)


register_facts(
    "hunyuan_v1_moe",
    facts=TypeFacts(
        # The default has a single expert and no head size.
        defaults={"num_experts": 8, "moe_topk": 2, "head_dim": 128},
    ),
)
register_facts(
    "hunyuan_vl_text",
    facts=TypeFacts(
        # The default has no head size, which the attention reads, and no M-RoPE sections.
        defaults={
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]},
        },
    ),
)
register_facts(
    "hunyuan_v1_dense",
    facts=TypeFacts(
        # The default has no head size, which the attention reads.
        defaults={"head_dim": 128},
    ),
)
register_facts(
    "hunyuan_vl_vision",
    facts=TypeFacts(
        no_gradient={r"\.image_sep$": "read by no forward"},
    ),
)
register_facts(
    "hy_v4",
    facts=TypeFacts(
        no_gradient=SPARSE_INDEXER,
    ),
)
