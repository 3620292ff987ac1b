"""Phi: with `qk_layernorm` one norm sees the heads of this rank only."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("phi")
def phi(model: Any) -> ModelSpec:
    norms = ("q_layernorm", "k_layernorm")
    return corrected_spec(model, {f"layers.*.self_attn.{norm}": "replicated_sum" for norm in norms})
