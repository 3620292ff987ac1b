"""Qwen3-VL and Qwen3-Omni: Qwen3 layers, for which transformers has no plan or one without the per-head norms."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec, family_spec, gated_decoder_plan

_NORMS = ("q_norm", "k_norm")


@register_model("qwen3_vl_text")
def qwen3_vl_text(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan(norms=_NORMS))


@register_model("qwen3_vl_moe_text")
@register_model("qwen3_omni_moe_text")
def qwen3_moe_text(model: Any) -> ModelSpec:
    return corrected_spec(model, {f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce" for norm in _NORMS})
