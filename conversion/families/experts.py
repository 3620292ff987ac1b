"""Mixtral, Qwen2-MoE and Qwen3-MoE: Llama's attention, with MoE blocks in all or some layers."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import Arguments, Family, attention, dense_mlp, gated_mlp, rotary_decoder_arguments, sparse_mlp


def _is_sparse(config: Any, number: int) -> bool:
    if config.model_type == "mixtral":
        return True
    return number not in (config.mlp_only_layers or ()) and (number + 1) % config.decoder_sparse_step == 0


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    qwen2, qwen3 = config.model_type == "qwen2_moe", config.model_type == "qwen3_moe"
    bias = qwen3 and bool(config.attention_bias)
    qkv_bias = bias or (qwen2 and config.qkv_bias)
    yield from attention(config, source, target, qkv_bias=qkv_bias, output_bias=bias, qk_norms=qwen3)
    if not _is_sparse(config, number):
        yield from dense_mlp(config, source, target)
        return
    yield from sparse_mlp(source, target)
    if qwen2:
        width = config.shared_expert_intermediate_size
        yield from gated_mlp(width, f"{source}.mlp.shared_expert", f"{target}.mlp.shared_experts")
        yield Rule((f"{source}.mlp.shared_expert_gate.weight",), (f"{target}.mlp.shared_experts.gate_weight",))


def _arguments(config: Any) -> Arguments:
    mixtral, qwen2 = config.model_type == "mixtral", config.model_type == "qwen2_moe"
    further = {"moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size} if qwen2 else {}
    return rotary_decoder_arguments(
        config,
        add_qkv_bias=qwen2 and config.qkv_bias,
        qk_layernorm=config.model_type == "qwen3_moe",
        num_experts=config.num_local_experts if mixtral else config.num_experts,
        moe_ffn_hidden_size=config.intermediate_size if mixtral else config.moe_intermediate_size,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_pre_softmax=not (mixtral or config.norm_topk_prob),
        moe_layer_freq=[int(_is_sparse(config, number)) for number in range(config.num_hidden_layers)],
        moe_shared_expert_gate=qwen2,
        **further,
    )


def _unchecked(config: Any) -> str | None:
    if config.model_type == "qwen3_moe" and config.attention_bias:
        return "Megatron-Core has no separate switch for the bias of o_proj"
    return None


FAMILY = Family(
    model_types=("mixtral", "qwen2_moe", "qwen3_moe"), layer=_layer, arguments=_arguments, unchecked=_unchecked
)
