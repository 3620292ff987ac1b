"""Mamba 2 mixers: each group of heads has its B, C, norm and states to itself."""

from typing import Any

from ...spec import HeadBlock, ModelSpec
from ..family import corrected_spec
from ..lookup import register_model

_STATES = ("n_groups", "ssm_state_size")
_MIXED = (("intermediate_size",), _STATES, _STATES)
_ROWS = 0, ()
HEADS = HeadBlock(
    ("num_heads", "n_groups", "intermediate_size", "conv_dim"),
    {
        "in_proj.weight": (0, (("intermediate_size",), *_MIXED, ("num_heads",))),
        "in_proj.bias": (0, (("intermediate_size",), *_MIXED, ("num_heads",))),
        "conv1d.weight": (0, _MIXED),
        "conv1d.bias": (0, _MIXED),
        "norm.weight": _ROWS,
        "dt_bias": _ROWS,
        "A_log": _ROWS,
        "D": _ROWS,
        "out_proj.weight": (1, ()),
    },
    summed=("out_proj.bias",),
)


@register_model("nemotron_h")
def nemotron_h(model: Any) -> ModelSpec:
    return corrected_spec(model, head_blocks={"layers.*.mixer": HEADS})
