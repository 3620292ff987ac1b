"""Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3: RMSNorm, rotary positions, gated MLP."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Joined, Rule
from .family import (
    Arguments,
    Family,
    attention,
    common_arguments,
    fused_norm,
    layers,
    qk_norms,
    renamed,
    rotary_arguments,
    vocabulary,
)


def _biases(config: Any) -> tuple[bool, bool, bool]:
    """Of q, k and v, of the output projection, of the MLP."""
    if config.model_type == "qwen2":
        return True, False, False
    attention_bias = bool(getattr(config, "attention_bias", False))
    return attention_bias, attention_bias, bool(getattr(config, "mlp_bias", False))


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    qkv_bias, output_bias, mlp_bias = _biases(config)
    width = config.intermediate_size
    yield from vocabulary(config, padded, "model.embed_tokens")
    for number in layers(config):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        yield from fused_norm(f"{source}.input_layernorm", f"{target}.self_attention.linear_qkv")
        yield from attention(
            config, f"{source}.self_attn", f"{target}.self_attention", qkv_bias=qkv_bias, output_bias=output_bias
        )
        if config.model_type == "qwen3":
            yield from qk_norms(f"{source}.self_attn", f"{target}.self_attention")
        yield from fused_norm(f"{source}.post_attention_layernorm", f"{target}.mlp.linear_fc1")
        for suffix in ("weight", "bias") if mlp_bias else ("weight",):
            names = (f"{source}.mlp.gate_proj.{suffix}", f"{source}.mlp.up_proj.{suffix}")
            yield Rule(names, (f"{target}.mlp.linear_fc1.{suffix}",), Joined((width, width)))
        yield from renamed(f"{source}.mlp.down_proj", f"{target}.mlp.linear_fc2", bias=mlp_bias)
    yield from renamed("model.norm", "decoder.final_layernorm")


def _arguments(config: Any) -> Arguments:
    qkv_bias, output_bias, mlp_bias = _biases(config)
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=output_bias and mlp_bias,
        add_qkv_bias=qkv_bias,
        qk_layernorm=config.model_type == "qwen3",
    )


def _unchecked(config: Any) -> str | None:
    _, output_bias, mlp_bias = _biases(config)
    if output_bias != mlp_bias:
        return "add_bias_linear of Megatron-Core switches the biases of attention and MLP together"
    return None


FAMILY = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"), rules=_rules, arguments=_arguments, unchecked=_unchecked
)
