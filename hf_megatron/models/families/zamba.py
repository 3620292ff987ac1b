"""Zamba: Mamba mixers after attention and MLP blocks that layers share and that also read the token embeddings."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts
from .mamba2 import HEADS

_ROWS = 0, ()
# States, time steps, B and C are independent per head; weights are grouped by head, channels and gates together.
OF_ZAMBA = HeadBlock(
    ("n_mamba_heads", "intermediate_size"),
    dict.fromkeys([f"{name}.{kind}" for name in ("in_proj", "conv1d") for kind in ("weight", "bias")], _ROWS)
    | dict.fromkeys(("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"), _ROWS)
    | {"out_proj.weight": (1, ())},
    summed=("out_proj.bias",),
)


def with_shared_blocks(model: Any, block: str, plan: dict[str, str], mixer: HeadBlock) -> ModelSpec:
    """Returns the spec of a model whose layers share attention and MLP.

    Args:
        block (`str`): name of the module that contains both.
        plan (`dict[str, str]`): styles of the MLP's input linears and of other sharded modules.
        mixer (`HeadBlock`): the Mamba mixers of the layers.
    """
    shared, mixers = f"layers.*.{block}", (f"layers.*.{place}mamba" for place in ("", "mamba_decoder."))
    styles = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), "colwise")
    rows = {"self_attn": "self_attn.o_proj", "feed_forward": "feed_forward.down_proj"}
    styles |= dict.fromkeys(rows.values(), "rowwise")
    return family_spec(
        model,
        {"embed_tokens": "embedding_rowwise", **{f"{shared}.{name}": style for name, style in styles.items()}} | plan,
        # Explicit regions, because attention and MLP may contain adapters in addition to their linears.
        regions={f"{shared}.{name}": f"{shared}.{row}" for name, row in rows.items()},
        pointwise_containers=(shared, "layers.*.mamba_decoder"),
        per_token_arguments=("original_hidden_states",),
        pre_layer_arguments=("original_hidden_states",),
        head_sharded_blocks={base_prefix(model) + name: mixer for name in mixers},
    )


@register_model("zamba")
def zamba(model: Any) -> ModelSpec:
    firsts = dict.fromkeys((f"layers.*.shared_transf.feed_forward.{name}_proj" for name in ("gate", "up")), "colwise")
    return with_shared_blocks(model, "shared_transf", firsts, OF_ZAMBA)


@register_model("zamba2")
def zamba2(model: Any) -> ModelSpec:
    # Adapters are pairs of linears with numeric names, which patterns cannot distinguish from layer indices.
    kinds = {"q": "colwise", "k": "colwise", "v": "colwise", "gate_up_proj": "packed_colwise"}
    plan = {"layers.*.shared_transformer.feed_forward.gate_up_proj": "packed_colwise"}
    for name, _ in model.named_modules():
        owner, _, number = name.removeprefix(base_prefix(model)).rpartition(".")
        if "_adapter_list." in owner and number in ("0", "1"):
            kind = next(kind for part, kind in kinds.items() if f"{part}_adapter_list." in owner)
            plan[f"{owner}.{number}"] = kind if number == "1" else "replicated_with_grad_allreduce"
    return with_shared_blocks(model, "shared_transformer", plan, HEADS)


register_facts(
    "zamba2",
    facts=TypeFacts(
        # The default has neither adapters nor RoPE, which some checkpoints have.
        defaults={"use_shared_attention_adapter": True, "use_mem_rope": True},
        tiny={
            **{
                "layers_block_type": ["linear_attention", "hybrid"] * 2,
                "num_hidden_layers": 4,
                "hybrid_layer_ids": [1, 3],
            },
            **{"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16, "adapter_rank": 12},
        },
    ),
)
register_facts(
    "zamba",
    facts=TypeFacts(
        # Two layers that share one block.
        tiny={
            **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
            **{"attention_hidden_size": 128, "attention_head_dim": 32},
        },
    ),
)
