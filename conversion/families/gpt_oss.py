"""gpt-oss: attention sinks, biases everywhere, experts whose gate and up rows alternate."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Interleaved, Rule, Transposed
from .family import (
    Arguments,
    Family,
    attention,
    chain,
    common_arguments,
    fused_norm,
    layers,
    renamed,
    rotary_arguments,
    vocabulary,
)


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    yield from vocabulary(config, padded, "model.embed_tokens")
    for number in layers(config):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        experts, inside = f"{source}.mlp.experts", f"{target}.mlp.experts.experts"
        yield from fused_norm(f"{source}.input_layernorm", f"{target}.self_attention.linear_qkv")
        yield from attention(config, f"{source}.self_attn", f"{target}.self_attention", qkv_bias=True, output_bias=True)
        yield Rule((f"{source}.self_attn.sinks",), (f"{target}.self_attention.core_attention.softmax_offset",))
        yield from renamed(f"{source}.post_attention_layernorm", f"{target}.pre_mlp_layernorm")
        yield from renamed(f"{source}.mlp.router", f"{target}.mlp.router", bias=True)
        gate_up = chain(Transposed(), Interleaved(dim=-2))
        yield Rule((f"{experts}.gate_up_proj",), (f"{inside}.linear_fc1.weight",), gate_up)
        yield Rule((f"{experts}.gate_up_proj_bias",), (f"{inside}.linear_fc1.bias",), Interleaved(dim=-1))
        yield Rule((f"{experts}.down_proj",), (f"{inside}.linear_fc2.weight",), Transposed())
        yield Rule((f"{experts}.down_proj_bias",), (f"{inside}.linear_fc2.bias",))
    yield from renamed("model.norm", "decoder.final_layernorm")


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=True,
        softmax_type="learnable",
        quick_geglu=True,
        swiglu=False,
        glu_linear_offset=1.0,
        num_experts=config.num_local_experts,
        moe_ffn_hidden_size=config.intermediate_size,
        moe_router_topk=config.num_experts_per_tok,
    )


def _refuse(config: Any) -> str | None:
    if not config.attention_bias:
        return "attention_bias=False: add_bias_linear of Megatron-Core covers attention and experts"
    return None


FAMILY = Family(model_types=("gpt_oss",), rules=_rules, arguments=_arguments, refuse=_refuse)
