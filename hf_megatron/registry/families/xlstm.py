"""xLSTM: matrix memories of heads, whose gates are beside queries, keys and values or in one linear with them."""

from typing import Any

from ...spec import HeadBlock, ModelSpec
from ..family import base_prefix, family_spec
from ..lookup import register_model

_ROWS = 0, ()
_APART = dict.fromkeys(("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact"), _ROWS)
_FUSED = {
    "qkv_opreact": (0, (("qk_dim",), ("qk_dim",), ("v_dim",), ("v_dim",))),
    "ifgate_preact": (0, (("config.num_heads",),) * 2),
}


def memory(linears: dict[str, Any]) -> HeadBlock:
    """Returns a memory's heads, of linears with entries for each."""
    rows = {**linears, "multihead_norm": _ROWS}
    return HeadBlock(
        ("config.num_heads", "multihead_norm.num_heads", "qk_dim", "v_dim"),
        {f"{name}.{kind}": of for name, of in rows.items() for kind in ("weight", "bias")}
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
        head_blocks={f"{base_prefix(model)}blocks.*.mlstm_layer": memory(_FUSED if is_fused else _APART)},
        # The memory's state beside hidden states.
        layer_values=2,
    )
