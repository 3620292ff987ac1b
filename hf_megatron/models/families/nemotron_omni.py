"""Nemotron 3 Omni: the RADIO vision encoder is large, so it is tensor-parallel too."""

from typing import Any

from ..composite import composite_spec
from ..registry import register_model
from ..spec import ModelSpec
from ..type_facts import TypeFacts, register_facts
from .mamba2 import make_mixer_spec

_LAYER = "vision_model.encoder.layer.*"
_COLUMNS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("attention.o_proj", "mlp.fc2", "mlp.down_proj")


@register_model("nemotron_h_omni")
def nemotron_h_omni(model: Any) -> ModelSpec | None:
    spec = composite_spec(model, {"nemotron_h": make_mixer_spec("mixer")})
    if spec is None:
        return None
    parts = {name for name, _ in model.named_modules()}
    encoder = {name: style for names, style in ((_COLUMNS, "colwise"), (_ROWS, "rowwise")) for name in names}
    plan = {
        f"{_LAYER}.{name}": style for name, style in encoder.items() if f"{_LAYER}.{name}".replace("*", "0") in parts
    }
    heads = {f"{_LAYER}.attention": ("num_attention_heads",)}
    return spec.updated(plan={**spec.tp.plan, **plan}, local_attributes={**spec.tp.local_attributes, **heads})


register_facts(
    "nemotron_h_omni",
    facts=TypeFacts(
        # The default has no placeholder tokens.
        defaults={"image_token_id": 100, "video_token_id": 101, "audio_token_id": 102},
        audio={
            "audio_config": {"model_type": "parakeet_encoder", "projection_hidden_size": 4096, "projection_bias": False}
        },
        no_gradient_without={"videos": {r"\.video_patch_projection\.": "reads videos: compared on images alone"}},
    ),
)
