"""Zamba: attention and MLP that several layers share, which read the embedded tokens too, before Mamba mixers."""

from typing import Any

from ...spec import HeadBlock, ModelSpec
from ..family import base_prefix, family_spec
from ..lookup import register_model
from .mamba2 import HEADS

_ROWS = 0, ()
# Each head has its states, steps, B and C to itself; its channels lie beside those of its gates.
OF_ZAMBA = HeadBlock(
    ("n_mamba_heads", "intermediate_size"),
    {
        **{f"{name}.weight": _ROWS for name in ("in_proj", "conv1d")},
        **{f"{name}.bias": _ROWS for name in ("in_proj", "conv1d")},
        **dict.fromkeys(("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"), _ROWS),
        "out_proj.weight": (1, ()),
    },
    summed=("out_proj.bias",),
)


def of_shared_blocks(model: Any, name: str, adapters: dict[str, str], firsts: dict[str, str], mixer: HeadBlock) -> Any:
    """Returns the spec of a model with blocks that layers share, by their name.

    Args:
        adapters (`dict[str, str]`): list of pairs of linears -> style of the second one of each.
        firsts (`dict[str, str]`): first linears of the MLP -> their style.
    """
    prefix, shared = base_prefix(model), f"layers.*.{name}"
    plan = {f"self_attn.{one}_proj": "column" for one in "qkv"} | {f"feed_forward.{one}": of for one, of in firsts.items()}
    plan |= {"self_attn.o_proj": "row", "feed_forward.down_proj": "row"}
    of_adapters: dict[str, str] = {}
    for block, _ in model.named_modules():
        owner, _, number = block.removeprefix(prefix).rpartition(".")
        part, style = owner.rpartition(".")[0].rpartition(f"{name}.")[2], "replicated_sum"
        if part in adapters and number in "01":
            of_adapters[block.removeprefix(prefix)] = adapters[part] if number == "1" else style
    rows = {f"{shared}.self_attn": f"{shared}.self_attn.o_proj", f"{shared}.feed_forward": f"{shared}.feed_forward.down_proj"}
    return family_spec(
        model,
        {"embed_tokens": "vocab_embedding", **{f"{shared}.{linear}": of for linear, of in plan.items()}, **of_adapters},
        regions=rows,
        transparent=(shared, "layers.*.mamba_decoder"),
        sequence_arguments=("original_hidden_states",),
        head_blocks={f"{prefix}layers.*.{place}mamba": mixer for place in ("", "mamba_decoder.")},
        early_arguments=("original_hidden_states",),
    )


@register_model("zamba")
def zamba(model: Any) -> ModelSpec:
    return of_shared_blocks(model, "shared_transf", {}, {"gate_proj": "column", "up_proj": "column"}, OF_ZAMBA)


@register_model("zamba2")
def zamba2(model: Any) -> ModelSpec:
    adapters = {f"self_attn.linear_{one}_adapter_list": "column" for one in "qkv"}
    adapters["feed_forward.gate_up_proj_adapter_list"] = "packed_column"
    return of_shared_blocks(model, "shared_transformer", adapters, {"gate_up_proj": "packed_column"}, HEADS)
