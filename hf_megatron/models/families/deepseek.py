"""DeepSeek V4: hyper-connections weigh the residual streams of each token by itself, so they run on split sequences."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("deepseek_v4")
def deepseek_v4(model: Any) -> ModelSpec:
    return corrected_spec(
        model, pointwise_containers=("layers.*.attn_hc", "layers.*.ffn_hc"), sequence_dims={"input_ids": 1}
    )
