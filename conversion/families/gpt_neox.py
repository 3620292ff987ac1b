"""GPT-NeoX: LayerNorm, biases, partial rotary positions; q, k and v are packed per head, as in Megatron."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import BIASES_TOGETHER, Arguments, Family, common_arguments, fused_norm, renamed
from .positions import rotary_arguments


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    bias = config.attention_bias
    attention, mlp = f"{target}.self_attention", f"{target}.mlp"
    yield from fused_norm(f"{source}.input_layernorm", f"{attention}.linear_qkv", bias=True)
    yield from renamed(f"{source}.attention.query_key_value", f"{attention}.linear_qkv", bias=bias)
    yield from renamed(f"{source}.attention.dense", f"{attention}.linear_proj", bias=bias)
    yield from fused_norm(f"{source}.post_attention_layernorm", f"{mlp}.linear_fc1", bias=True)
    yield from renamed(f"{source}.mlp.dense_h_to_4h", f"{mlp}.linear_fc1", bias=True)
    yield from renamed(f"{source}.mlp.dense_4h_to_h", f"{mlp}.linear_fc2", bias=True)


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="LayerNorm",
        norm_epsilon=config.layer_norm_eps,
        swiglu=False,
    )


def _unchecked(config: Any) -> str | None:
    if config.use_parallel_residual:
        return "Megatron-Core has no layer with parallel attention and MLP (use_parallel_residual)"
    return None if config.attention_bias else BIASES_TOGETHER


FAMILY = Family(
    model_types=("gpt_neox",),
    layer=_layer,
    arguments=_arguments,
    gated=False,
    unchecked=_unchecked,
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    norm_bias=True,
)
