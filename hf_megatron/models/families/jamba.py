"""Jamba and Mamba: states are independent per channel; time steps, B and C are computed from all channels."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_CHANNELS = ("intermediate_size",)
_ROWS = 0, ()
_COLUMNS = 1, ()
_STATES_AND_GATES = 0, (_CHANNELS, _CHANNELS)
MIXER = HeadBlock(
    _CHANNELS,
    {
        "in_proj.weight": _STATES_AND_GATES,
        "in_proj.bias": _STATES_AND_GATES,
        "conv1d.weight": _ROWS,
        "conv1d.bias": _ROWS,
        "x_proj.weight": _COLUMNS,
        "dt_proj.weight": _ROWS,
        "dt_proj.bias": _ROWS,
        "A_log": _ROWS,
        "D": _ROWS,
        "out_proj.weight": _COLUMNS,
    },
    summed=("out_proj.bias",),
    all_head_linears=("x_proj",),
)


@register_model("jamba")
def jamba(model: Any) -> ModelSpec:
    return corrected_spec(model, head_sharded_blocks={"layers.*.mamba": MIXER})


@register_model("mamba")
@register_model("falcon_mamba")
def mamba(model: Any) -> ModelSpec:
    return corrected_spec(model, head_sharded_blocks={"layers.*.mixer": MIXER})


register_facts(
    "mamba",
    "falcon_mamba",
    facts=TypeFacts(
        tiny={"intermediate_size": 128},
    ),
)
