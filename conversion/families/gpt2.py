"""GPT-2: learned positions, LayerNorm, biases, and weights stored [in, out]."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Chain, Divided, GroupedQKV, Rule, Transposed
from .family import Arguments, Family, common_arguments, fused_norm, renamed


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    width, heads = config.hidden_size, config.num_attention_heads
    packed = Chain((Transposed(), Divided((width, width, width)), GroupedQKV(heads, heads, width // heads)))
    attention, mlp = f"{target}.self_attention", f"{target}.mlp"
    yield from fused_norm(f"{source}.ln_1", f"{attention}.linear_qkv", bias=True)
    # Biases pass through the same operation: they have one dim, and `Transposed` leaves them unchanged.
    yield from renamed(f"{source}.attn.c_attn", f"{attention}.linear_qkv", bias=True, operation=packed)
    yield from renamed(f"{source}.attn.c_proj", f"{attention}.linear_proj", bias=True, operation=Transposed())
    yield from fused_norm(f"{source}.ln_2", f"{mlp}.linear_fc1", bias=True)
    yield from renamed(f"{source}.mlp.c_fc", f"{mlp}.linear_fc1", bias=True, operation=Transposed())
    yield from renamed(f"{source}.mlp.c_proj", f"{mlp}.linear_fc2", bias=True, operation=Transposed())


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        ffn_hidden_size=config.n_inner or 4 * config.hidden_size,
        normalization="LayerNorm",
        norm_epsilon=config.layer_norm_epsilon,
        position_embedding_type="learned_absolute",
        swiglu=False,
    )


def _unchecked(config: Any) -> str | None:
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        return "Megatron-LM has no argument for attention scores that are scaled by layer or not scaled"
    return None


FAMILY = Family(
    model_types=("gpt2",),
    layer=_layer,
    arguments=_arguments,
    gated=False,
    unchecked=_unchecked,
    unsupported_reason=lambda config: (
        "add_cross_attention has no counterpart in Megatron-Core's GPTModel" if config.add_cross_attention else None
    ),
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    norm="transformer.ln_f",
    norm_bias=True,
)
