"""Pegasus-X: encoder layers process global tokens and text tokens with the same weights."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec

_ATTENTION = "encoder.layers.*.self_attn"


@register_model("pegasus_x")
def pegasus_x(model: Any) -> ModelSpec:
    base = base_prefix(model)
    columns = {f"{_ATTENTION}.{name}_proj": "colwise_gather_output" for name in "qkv"}
    # The attention derives its output width from its input, so heads cannot be sharded; shard the weights only.
    spec = corrected_spec(
        model,
        {**columns, f"{_ATTENTION}.out_proj": "rowwise_split_input"},
        # Encoder layers have two sequences (global and text tokens), so they are not sequence-sharded.
        layer_stacks=(f"{base}decoder.layers",),
    )
    attention = f"{base}{_ATTENTION}"
    return spec.updated(
        regions={block: row for block, row in spec.tp.regions.items() if block != attention},
        local_attributes={name: counts for name, counts in spec.tp.local_attributes.items() if name != attention},
    )
