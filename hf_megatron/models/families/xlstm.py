"""xLSTM: per-head matrix memories with gates computed alongside queries, keys and values."""

from typing import Any

from ...errors import UnsupportedError
from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts

_LINEARS = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
_KINDS = ("weight", "bias")
MEMORY = HeadBlock(
    ("config.num_heads", "multihead_norm.num_heads", "qk_dim", "v_dim"),
    {f"{name}.{kind}": (0, ()) for name in (*_LINEARS, "multihead_norm") for kind in _KINDS}
    | {"out_proj.weight": (1, ())},
    summed=("out_proj.bias",),
)


@register_model("xlstm")
def xlstm(model: Any) -> ModelSpec:
    if model.config.weight_mode != "single":
        raise UnsupportedError(
            f"xlstm with weight_mode={model.config.weight_mode!r} is not supported: transformers cannot initialize its "
            "weights, and no parity check covers it. Set weight_mode='single'."
        )
    mlp = {"proj_up_gate": "colwise", "proj_up": "colwise", "proj_down": "rowwise"}
    return family_spec(
        model,
        {"embeddings": "embedding_rowwise", **{f"blocks.*.ffn.{name}": style for name, style in mlp.items()}},
        head_sharded_blocks={f"{base_prefix(model)}blocks.*.mlstm_layer": MEMORY},
        full_sequence_blocks=("blocks.*.mlstm_layer",),
        # Hidden states and the memory state.
        layer_num_outputs=2,
    )


register_facts(
    "xlstm",
    facts=TypeFacts(
        # Run the kernels in full precision.
        tiny={"embedding_dim": 64, "autocast_kernel_dtype": "float32"},
    ),
)
