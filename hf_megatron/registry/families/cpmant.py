"""CPM-Ant: a prompt before every row, and biases of positions that are made once for all layers."""

from typing import Any

from ...spec import ModelSpec
from ..family import family_spec
from ..lookup import register_model

_LAYERS = "encoder.layers.*"


@register_model("cpmant")
def cpmant(model: Any) -> ModelSpec:
    attention, mlp = f"{_LAYERS}.self_att.self_attention", f"{_LAYERS}.ffn.ffn"
    return family_spec(
        model,
        {
            **{f"{attention}.project_{name}": "column" for name in "qkv"},
            **{f"{mlp}.w_in.{name}": "column" for name in ("w_0", "w_1")},
            **{f"{attention}.attention_out": "row", f"{mlp}.w_out": "row"},
        },
        local_attributes={attention: ("num_heads",)},
        local_arguments={attention: ("position_bias",)},
        regions={mlp: f"{mlp}.w_out"},
        transparent=(f"{_LAYERS}.self_att", f"{_LAYERS}.ffn"),
        no_pipeline="its biases of positions are made by a part that the first stage alone has. Load it with pp_size=1.",
    )
