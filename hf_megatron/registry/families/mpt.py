"""MPT: every layer gets the biases of all heads by their distance."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("mpt")
def mpt(model: Any) -> ModelSpec:
    return corrected_spec(model, local_arguments={"blocks.*.attn": ("position_bias",)})
