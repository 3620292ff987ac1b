"""GLM: norms of single heads that transformers' plan leaves out, and sparse attention that later layers reuse."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("glm_moe_dsa")
def glm_moe_dsa(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        whole_blocks=("layers.*.self_attn",),
        # Token indices that later layers read.
        layer_values=2,
    )


@register_model("glm4_moe")
def glm4_moe(model: Any) -> ModelSpec:
    # Their weights are those of one head, and each rank computes with some of the heads.
    norms = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm") if model.config.use_qk_norm else ()
    return corrected_spec(model, dict.fromkeys(norms, "replicated_sum"))
