"""GPT-2: learned positions, LayerNorm, biases, and weights stored [in, out]."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Divided, GroupedQKV, Rule, Transposed
from .family import Arguments, Family, chain, common_arguments, fused_norm, layers, renamed, vocabulary


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    width = config.hidden_size
    heads = config.num_attention_heads
    packed = chain(Transposed(), Divided((width, width, width)), GroupedQKV(heads, heads, width // heads))
    yield from vocabulary(config, padded, "transformer.wte")
    yield from renamed("transformer.wpe", "embedding.position_embeddings")
    for number in layers(config):
        source, target = f"transformer.h.{number}", f"decoder.layers.{number}"
        attention, mlp = f"{target}.self_attention", f"{target}.mlp"
        yield from fused_norm(f"{source}.ln_1", f"{attention}.linear_qkv", bias=True)
        # A bias has one dim, which nothing is to be transposed in.
        yield from renamed(f"{source}.attn.c_attn", f"{attention}.linear_qkv", bias=True, operation=packed)
        yield from renamed(f"{source}.attn.c_proj", f"{attention}.linear_proj", bias=True, operation=Transposed())
        yield from fused_norm(f"{source}.ln_2", f"{mlp}.linear_fc1", bias=True)
        yield from renamed(f"{source}.mlp.c_fc", f"{mlp}.linear_fc1", bias=True, operation=Transposed())
        yield from renamed(f"{source}.mlp.c_proj", f"{mlp}.linear_fc2", bias=True, operation=Transposed())
    yield from renamed("transformer.ln_f", "decoder.final_layernorm", bias=True)


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        ffn_hidden_size=config.n_inner or 4 * config.hidden_size,
        normalization="LayerNorm",
        norm_epsilon=config.layer_norm_epsilon,
        position_embedding_type="learned_absolute",
        swiglu=False,
    )


def _refuse(config: Any) -> str | None:
    if config.add_cross_attention:
        return "add_cross_attention has no counterpart in Megatron-Core's GPTModel"
    return None


FAMILY = Family(model_types=("gpt2",), rules=_rules, arguments=_arguments, gated=False, refuse=_refuse)
