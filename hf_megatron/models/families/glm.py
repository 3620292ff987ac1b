"""GLM: norms of single heads that transformers' plan leaves out, and sparse attention that later layers reuse."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec

_LINEAR = "linear_attention"


@register_model("glm_moe_dsa")
def glm_moe_dsa(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        full_sequence_blocks=("layers.*.self_attn",),
        # Token indices that later layers read.
        layer_num_outputs=2,
    )


@register_model("glm5_next_text")
def glm5_next_text(model: Any) -> ModelSpec:
    linear = [f"layers.{index}.self_attn" for index, kind in enumerate(model.config.layer_types) if kind == _LINEAR]
    return corrected_spec(
        model,
        # transformers splits what reads the heads of a delta net, and no more of it.
        {f"{block}.o_proj": "replicated" for block in linear},
        pointwise_containers=("layers.*.attn_hc", "layers.*.ffn_hc"),
        full_sequence_blocks=("layers.*.self_attn",),
        layer_num_outputs=2,
    )


@register_model("glm4_moe")
def glm4_moe(model: Any) -> ModelSpec:
    # Their weights are those of one head, and each rank computes with some of the heads.
    norms = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm") if model.config.use_qk_norm else ()
    return corrected_spec(model, dict.fromkeys(norms, "replicated_with_grad_allreduce"))
