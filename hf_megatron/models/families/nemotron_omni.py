"""Nemotron 3 Omni: a RADIO tower, as large as the text model's first layers, is split beside it."""

from typing import Any

from ..composite import composite_spec
from ..registry import register_model
from ..spec import ModelSpec
from .mamba2 import of_mixers

_LAYER = "vision_model.encoder.layer.*"
_COLUMNS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("attention.o_proj", "mlp.fc2", "mlp.down_proj")


@register_model("nemotron_h_omni")
def nemotron_h_omni(model: Any) -> ModelSpec | None:
    spec = composite_spec(model, {"nemotron_h": of_mixers("mixer")})
    if spec is None:
        return None
    parts = {name for name, _ in model.named_modules()}
    tower = {name: style for names, style in ((_COLUMNS, "colwise"), (_ROWS, "rowwise")) for name in names}
    plan = {f"{_LAYER}.{name}": style for name, style in tower.items() if f"{_LAYER}.{name}".replace("*", "0") in parts}
    heads = {f"{_LAYER}.attention": ("num_attention_heads",)}
    return spec.updated(plan={**spec.tp.plan, **plan}, local_attributes={**spec.tp.local_attributes, **heads})
