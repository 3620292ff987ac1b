"""KOSMOS-2 and 2.5: an image encoder, a projection that attends to it, and a custom language model."""

from typing import Any

from ..registry import REGISTRY, register_model
from ..spec import ModelSpec
from ..spec_helpers import composite_family_spec, family_spec

_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), {"fc1": "colwise", "fc2": "rowwise"}
_ATTENTION = dict.fromkeys(_QKV, "colwise") | {"out_proj": "rowwise"}
# For blocks with a norm over all features before the output linear: shard the weights only.
_NORMED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
_TOWERS = {
    **{f"vision_model.model.encoder.layers.*.self_attn.{name}": style for name, style in _ATTENTION.items()},
    **{f"vision_model.model.encoder.layers.*.mlp.{name}": style for name, style in _MLP.items()},
    **{f"vision_model.encoder.layer.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "vision_model.encoder.layer.*.attention.output": "rowwise",
    **{f"vision_model.encoder.layer.*.mlp.{name}": "colwise" for name in ("wi_0", "wi_1")},
    "vision_model.encoder.layer.*.mlp.wo": "rowwise",
    **{f"image_to_text_projection.x_attn.{name}": style for name, style in _ATTENTION.items()},
}


@register_model("kosmos_2_text_model")
@register_model("kosmos_2_5_text_model")
def kosmos_text(model: Any) -> ModelSpec:
    names = {name for name, _ in model.named_modules()}
    attention = {f"self_attn.{name}": style for name, style in _ATTENTION.items()}
    if "model.layers.0.self_attn.inner_attn_ln" in names:
        attention = {name: _NORMED[style] for name, style in attention.items()}
    blocks = attention | {f"ffn.{name}": _NORMED[style] for name, style in _MLP.items()}
    return family_spec(
        model,
        {"model.embed_tokens": "embedding_rowwise"}
        | {f"model.layers.*.{name}": style for name, style in blocks.items()},
        after_layers=("model.layer_norm",),
    )


@register_model("kosmos-2")
@register_model("kosmos-2.5")
def kosmos(model: Any) -> ModelSpec:
    return composite_family_spec(
        model,
        REGISTRY,
        _TOWERS,
        multi_input_blocks=("image_to_text_projection.x_attn",),
        # KOSMOS-2.5 accepts calls without images.
        image_features_argument="image_embeds" if model.config.model_type == "kosmos-2" else None,
    )
