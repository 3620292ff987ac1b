"""BLT: bytes are cut into patches between stacks of layers, and patches and bytes read each other there."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("blt")
def blt(model: Any) -> ModelSpec:
    reason = "between its stacks and their layers patches read whole sequences of bytes."
    return corrected_spec(model, no_sequence_parallel=reason)
