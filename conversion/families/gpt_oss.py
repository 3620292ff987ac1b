"""gpt-oss: attention sinks, biases everywhere, experts with interleaved gate and up rows."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Chain, Deinterleave, Rule, Transposed
from .family import Arguments, Family, attention, renamed, rotary_decoder_arguments


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    experts, inside = f"{source}.mlp.experts", f"{target}.mlp.experts.experts"
    yield from attention(config, source, target, qkv_bias=True, output_bias=True)
    yield Rule((f"{source}.self_attn.sinks",), (f"{target}.self_attention.core_attention.softmax_offset",))
    yield from renamed(f"{source}.post_attention_layernorm", f"{target}.pre_mlp_layernorm")
    yield from renamed(f"{source}.mlp.router", f"{target}.mlp.router", bias=True)
    gate_up = Chain((Transposed(), Deinterleave(dim=-2)))
    yield Rule((f"{experts}.gate_up_proj",), (f"{inside}.linear_fc1.weight",), gate_up)
    yield Rule((f"{experts}.gate_up_proj_bias",), (f"{inside}.linear_fc1.bias",), Deinterleave(dim=-1))
    yield Rule((f"{experts}.down_proj",), (f"{inside}.linear_fc2.weight",), Transposed())
    yield Rule((f"{experts}.down_proj_bias",), (f"{inside}.linear_fc2.bias",))


def _arguments(config: Any) -> Arguments:
    return rotary_decoder_arguments(
        config,
        add_bias_linear=True,
        softmax_type="learnable",
        quick_geglu=True,
        swiglu=False,
        glu_linear_offset=1.0,
        activation_func_clamp_value=config.swiglu_limit,
        num_experts=config.num_local_experts,
        moe_ffn_hidden_size=config.intermediate_size,
        moe_router_topk=config.num_experts_per_tok,
    )


def _unsupported_reason(config: Any) -> str | None:
    if not config.attention_bias:
        return "attention_bias=False: Megatron-Core's add_bias_linear covers both attention and experts"
    return None


FAMILY = Family(model_types=("gpt_oss",), layer=_layer, arguments=_arguments, unsupported_reason=_unsupported_reason)
