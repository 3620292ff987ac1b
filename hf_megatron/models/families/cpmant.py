"""CPM-Ant: a prompt before every sequence, and position biases that are computed once for all layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec

_LAYERS, _BIAS = "encoder.layers.*", "position_bias"
_EMBEDDINGS = ("input_embedding", "segment_embedding")


@register_model("cpmant")
def cpmant(model: Any) -> ModelSpec:
    attention, mlp = f"{_LAYERS}.self_att.self_attention", f"{_LAYERS}.ffn.ffn"
    return family_spec(
        model,
        {
            **{f"{attention}.project_{name}": "colwise" for name in "qkv"},
            **{f"{mlp}.w_in.{name}": "colwise" for name in ("w_0", "w_1")},
            **{f"{attention}.attention_out": "rowwise", f"{mlp}.w_out": "rowwise"},
        },
        local_attributes={attention: ("num_heads",)},
        local_arguments={attention: (_BIAS,)},
        regions={mlp: f"{mlp}.w_out"},
        pointwise_containers=(f"{_LAYERS}.self_att", f"{_LAYERS}.ffn"),
        before_layers=tuple(base_prefix(model) + name for name in (*_EMBEDDINGS, _BIAS)),
        run_on_all_stages=(base_prefix(model) + _BIAS,),
        pre_layer_arguments=(_BIAS,),
        # Hidden states and attention weights.
        layer_num_outputs=2,
        no_context_parallel="its prompt is prepended to each sequence.",
    )
