"""OLMo 2: norms behind attention and MLP, none before them, and norms over all heads' queries and keys.

The names are those of Megatron-Bridge (`src/megatron/bridge/models/olmo2/olmo2_bridge.py` at 57852623).
"""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import (
    Arguments,
    Family,
    attention,
    common_arguments,
    gated_mlp,
    layers,
    qk_norms,
    renamed,
    rotary_arguments,
    vocabulary,
)


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    bias = bool(config.attention_bias)
    yield from vocabulary(config, padded, "model.embed_tokens")
    for number in layers(config):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        yield from attention(config, f"{source}.self_attn", f"{target}.self_attention", qkv_bias=bias, output_bias=bias)
        yield from qk_norms(f"{source}.self_attn", f"{target}.self_attention")
        behind = f"{target}.self_attention.linear_proj.post_layernorm"
        yield from renamed(f"{source}.post_attention_layernorm", behind)
        yield from gated_mlp(config.intermediate_size, f"{source}.mlp", f"{target}.mlp")
        yield from renamed(f"{source}.post_feedforward_layernorm", f"{target}.mlp.linear_fc2.post_layernorm")
    yield from renamed("model.norm", "decoder.final_layernorm")


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=False,
        qk_layernorm=True,
    )


def _unchecked(config: Any) -> str | None:
    return "Megatron-Core 0.16.1 has no norms behind attention and MLP; the names are Megatron-Bridge's"


FAMILY = Family(model_types=("olmo2",), rules=_rules, arguments=_arguments, unchecked=_unchecked)
