"""HunYuan's dense text layers, around images too; V4, whose hyper-connections weigh each token's streams alone."""

from typing import Any

from ..composite import composite_spec
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec, family_spec, gated_decoder_plan


@register_model("hy_v4")
def hy_v4(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        pointwise_containers=("layers.*.attn_hc", "layers.*.ffn_hc"),
        full_sequence_blocks=("layers.*.self_attn",),
        # Token indices that later layers read.
        layer_num_outputs=2,
    )


@register_model("hunyuan_vl_text")
def hunyuan_vl_text(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan(norms=("query_layernorm", "key_layernorm")))


@register_model("hunyuan_vl")
def hunyuan_vl(model: Any) -> ModelSpec | None:
    reason = "positions of its images count those of all rows of a batch, which a microbatch lacks."
    spec = composite_spec(model, {"hunyuan_vl_text": hunyuan_vl_text})
    return None if spec is None else spec.updated(no_pipeline=f"{reason} Load it with pp_size=1.")


@register_model("hunyuan_v1_dense")
def hunyuan_v1_dense(model: Any) -> ModelSpec:
    return hunyuan_vl_text(model)
