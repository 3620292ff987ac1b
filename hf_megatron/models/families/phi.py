"""Phi: with `qk_layernorm` one norm sees the heads of this rank only."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("phi")
def phi(model: Any) -> ModelSpec:
    norms = ("q_layernorm", "k_layernorm")
    return corrected_spec(model, {f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce" for norm in norms})
