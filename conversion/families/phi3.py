"""Phi-3: Llama with q, k and v, and gate and up, in one linear each."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Divided, Rule
from .family import (
    Arguments,
    Family,
    chain,
    common_arguments,
    fused_norm,
    head_dim,
    kv_heads,
    layers,
    qkv,
    renamed,
    rotary_arguments,
    vocabulary,
)


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    queries, keys = (heads * head_dim(config) for heads in (config.num_attention_heads, kv_heads(config)))
    packed = chain(Divided((queries, keys, keys)), qkv(config))
    yield from vocabulary(config, padded, "model.embed_tokens")
    for number in layers(config):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        yield from fused_norm(f"{source}.input_layernorm", f"{target}.self_attention.linear_qkv")
        yield from renamed(f"{source}.self_attn.qkv_proj", f"{target}.self_attention.linear_qkv", operation=packed)
        yield from renamed(f"{source}.self_attn.o_proj", f"{target}.self_attention.linear_proj")
        yield from fused_norm(f"{source}.post_attention_layernorm", f"{target}.mlp.linear_fc1")
        yield from renamed(f"{source}.mlp.gate_up_proj", f"{target}.mlp.linear_fc1")
        yield from renamed(f"{source}.mlp.down_proj", f"{target}.mlp.linear_fc2")
    yield from renamed("model.norm", "decoder.final_layernorm")


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=False,
    )


FAMILY = Family(model_types=("phi3",), rules=_rules, arguments=_arguments)
