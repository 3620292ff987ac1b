"""CTRL: MLP linears have numeric names, which patterns cannot distinguish from layer indices."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec

_LAYER = {
    **{f"multi_head_attention.W{name}": "colwise" for name in "qkv"},
    **{"multi_head_attention.dense": "rowwise", "ffn.0": "colwise", "ffn.2": "rowwise"},
}


@register_model("ctrl")
def ctrl(model: Any) -> ModelSpec:
    layers = range(model.config.n_layer)
    return family_spec(
        model,
        {
            "w": "embedding_rowwise",
            **{f"h.{layer}.{name}": style for layer in layers for name, style in _LAYER.items()},
        },
    )
