"""HunYuan V4: hyper-connections weigh the residual streams of each token by itself, so they run on split sequences."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
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
