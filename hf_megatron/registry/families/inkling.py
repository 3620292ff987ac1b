"""Inkling: the fused gate and up weight of the experts is two blocks in memory, where transformers' plan names one."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("inkling_text")
@register_model("inkling2_text")
def inkling_text(model: Any) -> ModelSpec:
    return corrected_spec(model, {"layers.*.mlp.experts.gate_up_proj": "packed_rows"})
