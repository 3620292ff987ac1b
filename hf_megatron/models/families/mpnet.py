"""MPNet: relative position biases are computed once, from a table that is defined after the layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("mpnet")
def mpnet(model: Any) -> ModelSpec:
    table = ("encoder.relative_attention_bias",)
    return corrected_spec(model, before_layers=table, pre_layer_arguments=("position_bias",))
