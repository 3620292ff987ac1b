"""Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3: RMSNorm, rotary positions, gated MLP."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import BIASES_TOGETHER, Arguments, Family, attention, dense_mlp, rotary_decoder_arguments


def _biases(config: Any) -> tuple[bool, bool, bool]:
    """Returns whether q, k and v, the output projection, and the MLP have biases."""
    if config.model_type == "qwen2":
        return True, False, False
    attention_bias = bool(getattr(config, "attention_bias", False))
    return attention_bias, attention_bias, bool(getattr(config, "mlp_bias", False))


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    qkv_bias, output_bias, mlp_bias = _biases(config)
    norms = config.model_type == "qwen3"
    yield from attention(config, source, target, qkv_bias=qkv_bias, output_bias=output_bias, qk_norms=norms)
    yield from dense_mlp(config, source, target, bias=mlp_bias)


def _arguments(config: Any) -> Arguments:
    qkv_bias, output_bias, mlp_bias = _biases(config)
    return rotary_decoder_arguments(
        config,
        add_bias_linear=output_bias and mlp_bias,
        add_qkv_bias=qkv_bias,
        qk_layernorm=config.model_type == "qwen3",
    )


def _unchecked(config: Any) -> str | None:
    _, output_bias, mlp_bias = _biases(config)
    return BIASES_TOGETHER if output_bias != mlp_bias else None


FAMILY = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"), layer=_layer, arguments=_arguments, unchecked=_unchecked
)
