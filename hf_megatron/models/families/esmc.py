"""ESM C: norms over all heads' queries and keys stand between its projections."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("esmc")
def esmc(model: Any) -> ModelSpec:
    # As transformers plans OLMo 2, whose norms are the same: weights and their gradients are split, heads are not.
    attention = "layers.*.self_attn"
    joined = {f"{attention}.{name}_proj": "colwise_gather_output" for name in "qkv"}
    return corrected_spec(model, {**joined, f"{attention}.o_proj": "rowwise_split_input"})
