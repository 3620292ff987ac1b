"""HunYuan's dense text layers, and V4, whose hyper-connections weigh each token's streams by themselves."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec, family_spec, gated_decoder_plan
from ..lookup import register_model


@register_model("hy_v4")
def hy_v4(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        transparent=("layers.*.attn_hc", "layers.*.ffn_hc"),
        whole_blocks=("layers.*.self_attn",),
        # Token indices that later layers read.
        layer_values=2,
    )


@register_model("hunyuan_vl_text")
def hunyuan_vl_text(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan(norms=("query_layernorm", "key_layernorm")))


@register_model("hunyuan_v1_dense")
def hunyuan_v1_dense(model: Any) -> ModelSpec:
    return hunyuan_vl_text(model)
