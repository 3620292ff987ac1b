"""Phi-3: Llama with q, k and v packed in one linear, and gate and up in another."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Chain, Divided, Rule
from .family import Family, fused_norm, head_dim, kv_heads, qkv, renamed, rotary_decoder_arguments


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    queries, keys = (heads * head_dim(config) for heads in (config.num_attention_heads, kv_heads(config)))
    packed = Chain((Divided((queries, keys, keys)), qkv(config)))
    yield from fused_norm(f"{source}.input_layernorm", f"{target}.self_attention.linear_qkv")
    yield from renamed(f"{source}.self_attn.qkv_proj", f"{target}.self_attention.linear_qkv", operation=packed)
    yield from renamed(f"{source}.self_attn.o_proj", f"{target}.self_attention.linear_proj")
    yield from fused_norm(f"{source}.post_attention_layernorm", f"{target}.mlp.linear_fc1")
    yield from renamed(f"{source}.mlp.gate_up_proj", f"{target}.mlp.linear_fc1")
    yield from renamed(f"{source}.mlp.down_proj", f"{target}.mlp.linear_fc2")


FAMILY = Family(model_types=("phi3",), layer=_layer, arguments=rotary_decoder_arguments)
