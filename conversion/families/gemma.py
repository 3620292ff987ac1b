"""Gemma, Gemma 2 and the text models of Gemma 3: norms around zero (`layernorm_zero_centered_gamma`), as stored.

Gemma 2 and 3 have norms behind attention and MLP, for which Megatron-Core 0.16.1 has no place. Their names are those
that Megatron-Bridge gives them (`src/megatron/bridge/models/gemma/gemma2_bridge.py` at 0a12eb78, `gemma3_bridge.py` at
0a12eb78).
"""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import (
    Arguments,
    Family,
    attention,
    common_arguments,
    fused_norm,
    gated_mlp,
    layers,
    qk_norms,
    renamed,
    rotary_arguments,
    vocabulary,
)


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    sandwich = config.model_type != "gemma"
    bias = bool(config.attention_bias)
    yield from vocabulary(config, padded, "model.embed_tokens")
    for number in layers(config):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        yield from fused_norm(f"{source}.input_layernorm", f"{target}.self_attention.linear_qkv")
        yield from attention(config, f"{source}.self_attn", f"{target}.self_attention", qkv_bias=bias, output_bias=bias)
        if config.model_type == "gemma3_text":
            yield from qk_norms(f"{source}.self_attn", f"{target}.self_attention")
        before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        if sandwich:
            behind = f"{target}.self_attention.linear_proj.post_layernorm"
            yield from renamed(f"{source}.post_attention_layernorm", behind)
            behind = f"{target}.mlp.linear_fc2.post_layernorm"
            yield from renamed(f"{source}.post_feedforward_layernorm", behind)
        yield from fused_norm(f"{source}.{before}", f"{target}.mlp.linear_fc1")
        yield from gated_mlp(config.intermediate_size, f"{source}.mlp", f"{target}.mlp")
    yield from renamed("model.norm", "decoder.final_layernorm")


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=False,
        swiglu=False,
        apply_layernorm_1p=True,
        qk_layernorm=config.model_type == "gemma3_text",
    )


def _unchecked(config: Any) -> str | None:
    if config.model_type == "gemma":
        return None
    return "Megatron-Core 0.16.1 has no norms behind attention and MLP; the names are Megatron-Bridge's"


FAMILY = Family(
    model_types=("gemma", "gemma2", "gemma3_text"), rules=_rules, arguments=_arguments, unchecked=_unchecked
)
