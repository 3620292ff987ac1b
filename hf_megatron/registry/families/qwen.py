"""Qwen 4 (experimental): gated residual connections work on each token by itself, so they run on split sequences."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("qwen4_exp_text")
def qwen4_exp_text(model: Any) -> ModelSpec:
    return corrected_spec(model, transparent=("layers.*.attn_hyper_connection", "layers.*.mlp_hyper_connection"))
