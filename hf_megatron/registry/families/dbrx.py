"""DBRX: its experts hold their weights one below the other, in a module inside of theirs."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("dbrx")
def dbrx(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        experts={"blocks.*.ffn.experts": "num_experts"},
        no_sequence_parallel="transformers has no tensor parallel plan of its layers.",
    )
