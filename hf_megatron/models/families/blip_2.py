"""BLIP-2 and InstructBLIP: an image encoder, a Q-Former and a language model of any type."""

from typing import Any

from ..registry import REGISTRY, register_model
from ..spec import ModelSpec
from ..spec_helpers import composite_family_spec
from ..type_facts import TypeFacts, register_facts

# The encoder splits its fused projection by its input width, so every rank needs all heads; shard the weights only.
TOWER = {
    "self_attn.qkv": "colwise_gather_output",
    "self_attn.projection": "rowwise_split_input",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}
_ATTENTIONS = ("attention", "crossattention")
_QFORMER = {
    **{f"{block}.attention.{name}": "colwise" for block in _ATTENTIONS for name in ("query", "key", "value")},
    **{f"{block}.output.dense": "rowwise" for block in _ATTENTIONS},
    **{f"intermediate{of}.dense": "colwise" for of in ("", "_query")},
    **{f"output{of}.dense": "rowwise" for of in ("", "_query")},
}


@register_model("blip-2")
@register_model("instructblip")
def blip_2(model: Any) -> ModelSpec:
    return _around_text(model, "image")


@register_model("instructblipvideo")
def instructblipvideo(model: Any) -> ModelSpec:
    return _around_text(model, "video")


def _around_text(model: Any, kind: str) -> ModelSpec:
    layer = "qformer.encoder.layer.*"
    return composite_family_spec(
        model,
        REGISTRY,
        {
            **{f"vision_model.encoder.layers.*.{name}": style for name, style in TOWER.items()},
            **{f"{layer}.{name}": style for name, style in _QFORMER.items()},
        },
        image_features_argument=f"mm_encoder_outputs.{kind}",
        local_attributes={
            f"{layer}.{block}.attention": ("num_attention_heads", "all_head_size") for block in _ATTENTIONS
        },
    )


register_facts(
    "blip-2",
    "instructblip",
    facts=TypeFacts(
        # The default has no placeholder token.
        defaults={"image_token_index": 50265},
    ),
)
register_facts(
    "instructblipvideo",
    facts=TypeFacts(
        # The default has no placeholder token.
        defaults={"video_token_index": 50265},
    ),
)
