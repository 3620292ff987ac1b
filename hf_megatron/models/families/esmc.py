"""ESM C: query and key norms over all heads between the projections."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("esmc")
def esmc(model: Any) -> ModelSpec:
    # As in transformers' plan of OLMo 2, which has the same norms: weights and gradients are sharded, heads are not.
    attention = "layers.*.self_attn"
    joined = {f"{attention}.{name}_proj": "colwise_gather_output" for name in "qkv"}
    return corrected_spec(model, {**joined, f"{attention}.o_proj": "rowwise_split_input"})
