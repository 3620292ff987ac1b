"""GPT-NeoX: LayerNorm, biases, partial rotary positions; q, k and v are packed per head, as Megatron has them."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import Arguments, Family, common_arguments, fused_norm, layers, renamed, rotary_arguments, vocabulary


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    bias = config.attention_bias
    yield from vocabulary(config, padded, "gpt_neox.embed_in")
    for number in layers(config):
        source, target = f"gpt_neox.layers.{number}", f"decoder.layers.{number}"
        attention, mlp = f"{target}.self_attention", f"{target}.mlp"
        yield from fused_norm(f"{source}.input_layernorm", f"{attention}.linear_qkv", bias=True)
        yield from renamed(f"{source}.attention.query_key_value", f"{attention}.linear_qkv", bias=bias)
        yield from renamed(f"{source}.attention.dense", f"{attention}.linear_proj", bias=bias)
        yield from fused_norm(f"{source}.post_attention_layernorm", f"{mlp}.linear_fc1", bias=True)
        yield from renamed(f"{source}.mlp.dense_h_to_4h", f"{mlp}.linear_fc1", bias=True)
        yield from renamed(f"{source}.mlp.dense_4h_to_h", f"{mlp}.linear_fc2", bias=True)
    yield from renamed("gpt_neox.final_layer_norm", "decoder.final_layernorm", bias=True)


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
        return "attention and MLP beside each other (use_parallel_residual) are no layer of Megatron-Core"
    if not config.attention_bias:
        return "add_bias_linear of Megatron-Core switches the biases of attention and MLP together"
    return None


FAMILY = Family(model_types=("gpt_neox",), rules=_rules, arguments=_arguments, gated=False, unchecked=_unchecked)
