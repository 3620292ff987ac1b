"""RoFormer: its encoder makes angles of positions once for all layers."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("roformer")
def roformer(model: Any) -> ModelSpec:
    return corrected_spec(model, early_arguments=("sinusoidal_pos",))
