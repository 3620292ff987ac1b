"""xLSTM: matrix memories of heads, whose gates are beside queries, keys and values or in one linear with them."""

from typing import Any

from ...spec import HeadBlock, ModelSpec
from ..family import base_prefix, family_spec
from ..lookup import register_model

_ROWS = 0, ()
_LINEARS = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact", "multihead_norm")
_FUSED = 0, (("qk_dim",), ("qk_dim",), ("v_dim",), ("v_dim",))
_GATES = 0, (("config.num_heads",),) * 2
MEMORY = HeadBlock(
    ("config.num_heads", "multihead_norm.num_heads", "qk_dim", "v_dim"),
    {f"{name}.{kind}": _ROWS for name in _LINEARS for kind in ("weight", "bias")}
    | {f"qkv_opreact.{kind}": _FUSED for kind in ("weight", "bias")}
    | {f"ifgate_preact.{kind}": _GATES for kind in ("weight", "bias")}
    | {"out_proj.weight": (1, ())},
    summed=("out_proj.bias",),
)


@register_model("xlstm")
def xlstm(model: Any) -> ModelSpec:
    is_fused = model.config.weight_mode == "fused"
    firsts = {"proj_up_gate_z": "packed_column"} if is_fused else dict.fromkeys(("proj_up_gate", "proj_up"), "column")
    mlp = {f"blocks.*.ffn.{name}": style for name, style in {**firsts, "proj_down": "row"}.items()}
    return family_spec(
        model,
        {"embeddings": "vocab_embedding", **mlp},
        local_attributes={"blocks.*.ffn": ("up_proj_dim",)},
        head_blocks={f"{base_prefix(model)}blocks.*.mlstm_layer": MEMORY},
        # The memory's state beside hidden states.
        layer_values=2,
    )
