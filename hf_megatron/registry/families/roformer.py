"""RoFormer: a table beside the layers gives all of them the angles that their heads are rotated by."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("roformer")
def roformer(model: Any) -> ModelSpec:
    return corrected_spec(model, early_arguments=("sinusoidal_pos",), token_dims={"sinusoidal_pos": 2})
