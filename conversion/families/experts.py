"""Mixtral, Qwen2-MoE and Qwen3-MoE: Llama's attention, experts behind a router in all or some layers."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import (
    Arguments,
    Family,
    attention,
    common_arguments,
    experts,
    fused_norm,
    gated_mlp,
    layers,
    qk_norms,
    renamed,
    rotary_arguments,
    vocabulary,
)


def _is_sparse(config: Any, number: int) -> bool:
    if config.model_type == "mixtral":
        return True
    return number not in (config.mlp_only_layers or ()) and (number + 1) % config.decoder_sparse_step == 0


def _rules(config: Any, padded: int) -> Iterator[Rule]:
    qwen2, qwen3 = config.model_type == "qwen2_moe", config.model_type == "qwen3_moe"
    attention_bias = qwen3 and bool(config.attention_bias)
    yield from vocabulary(config, padded, "model.embed_tokens")
    for number in layers(config):
        source, target = f"model.layers.{number}", f"decoder.layers.{number}"
        yield from fused_norm(f"{source}.input_layernorm", f"{target}.self_attention.linear_qkv")
        yield from attention(
            config,
            f"{source}.self_attn",
            f"{target}.self_attention",
            qkv_bias=attention_bias or (qwen2 and config.qkv_bias),
            output_bias=attention_bias,
        )
        if qwen3:
            yield from qk_norms(f"{source}.self_attn", f"{target}.self_attention")
        if not _is_sparse(config, number):
            yield from fused_norm(f"{source}.post_attention_layernorm", f"{target}.mlp.linear_fc1")
            yield from gated_mlp(config.intermediate_size, f"{source}.mlp", f"{target}.mlp")
            continue
        yield from renamed(f"{source}.post_attention_layernorm", f"{target}.pre_mlp_layernorm")
        yield from renamed(f"{source}.mlp.gate", f"{target}.mlp.router")
        yield from experts(f"{source}.mlp.experts", f"{target}.mlp")
        if qwen2:
            width = config.shared_expert_intermediate_size
            yield from gated_mlp(width, f"{source}.mlp.shared_expert", f"{target}.mlp.shared_experts")
            gate = f"{source}.mlp.shared_expert_gate.weight"
            yield Rule((gate,), (f"{target}.mlp.shared_experts.gate_weight",))
    yield from renamed("model.norm", "decoder.final_layernorm")


def _arguments(config: Any) -> Arguments:
    mixtral, qwen2 = config.model_type == "mixtral", config.model_type == "qwen2_moe"
    further = {"moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size} if qwen2 else {}
    return common_arguments(
        config,
        **rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=qwen2 and config.qkv_bias,
        qk_layernorm=config.model_type == "qwen3_moe",
        num_experts=config.num_local_experts if mixtral else config.num_experts,
        moe_ffn_hidden_size=config.intermediate_size if mixtral else config.moe_intermediate_size,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_pre_softmax=not (mixtral or config.norm_topk_prob),
        moe_layer_freq=[int(_is_sparse(config, number)) for number in layers(config)],
        moe_shared_expert_gate=qwen2,
        **further,
    )


def _unchecked(config: Any) -> str | None:
    if config.model_type == "qwen3_moe" and config.attention_bias:
        return "the bias of o_proj has no switch of its own in Megatron-Core"
    return None


FAMILY = Family(
    model_types=("mixtral", "qwen2_moe", "qwen3_moe"), rules=_rules, arguments=_arguments, unchecked=_unchecked
)
