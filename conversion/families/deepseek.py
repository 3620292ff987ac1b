"""DeepSeek-V2 and V3: multi-latent attention; dense layers first, then routed and shared experts."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import InterleaveHeadRows, Operation, Rule, Same
from .family import Arguments, Family, common_arguments, dense_mlp, fused_norm, gated_mlp, renamed, sparse_mlp
from .positions import latent_rotary_arguments


def _rotary(config: Any, heads: int, start: int) -> Operation:
    # Megatron rotates adjacent rows (`rope_utils.py`, `multi_latent_attention`), as most of these models do.
    if getattr(config, "rope_interleave", True):
        return Same()
    return InterleaveHeadRows(heads, start, config.qk_rope_head_dim)


def _attention(config: Any, source: str, target: str) -> Iterator[Rule]:
    queries = _rotary(config, config.num_attention_heads, config.qk_nope_head_dim)
    if config.q_lora_rank is None:
        yield from renamed(f"{source}.q_proj", f"{target}.linear_q_proj", operation=queries)
    else:
        yield from renamed(f"{source}.q_a_proj", f"{target}.linear_q_down_proj")
        yield from fused_norm(f"{source}.q_a_layernorm", f"{target}.linear_q_up_proj")
        yield from renamed(f"{source}.q_b_proj", f"{target}.linear_q_up_proj", operation=queries)
    keys = _rotary(config, 1, config.kv_lora_rank)
    yield from renamed(f"{source}.kv_a_proj_with_mqa", f"{target}.linear_kv_down_proj", operation=keys)
    yield from fused_norm(f"{source}.kv_a_layernorm", f"{target}.linear_kv_up_proj")
    yield from renamed(f"{source}.kv_b_proj", f"{target}.linear_kv_up_proj")
    yield from renamed(f"{source}.o_proj", f"{target}.linear_proj")


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    yield from renamed(f"{source}.input_layernorm", f"{target}.input_layernorm")
    yield from _attention(config, f"{source}.self_attn", f"{target}.self_attention")
    if number < config.first_k_dense_replace:
        yield from dense_mlp(config, source, target)
        return
    yield from sparse_mlp(source, target, correction=config.model_type == "deepseek_v3")
    width = config.moe_intermediate_size * config.n_shared_experts
    yield from gated_mlp(width, f"{source}.mlp.shared_experts", f"{target}.mlp.shared_experts")


def _groups(config: Any) -> Arguments:
    """Returns the arguments of group-limited routing, which restricts the choice of experts to some groups."""
    limited = config.model_type == "deepseek_v3" or config.topk_method == "group_limited_greedy"
    if not limited or (config.n_group or 1) == 1:
        return {}
    return {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}


def _arguments(config: Any) -> Arguments:
    v3 = config.model_type == "deepseek_v3"
    return common_arguments(
        config,
        multi_latent_attention=True,
        num_query_groups=config.num_attention_heads,
        group_query_attention=False,
        kv_channels=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        qk_layernorm=True,
        **latent_rotary_arguments(config),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=False,
        num_experts=config.n_routed_experts,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        moe_layer_freq=[int(number >= config.first_k_dense_replace) for number in range(config.num_hidden_layers)],
        moe_router_topk=config.num_experts_per_tok,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
        moe_router_score_function="sigmoid" if v3 else "softmax",
        moe_router_enable_expert_bias=v3,
        moe_router_pre_softmax=not v3,
        **_groups(config),
    )


FAMILY = Family(
    model_types=("deepseek_v2", "deepseek_v3"),
    layer=_layer,
    arguments=_arguments,
    unsupported_reason=lambda config: (
        "attention_bias: the linear layers of Megatron-Core's latent attention have no biases"
        if config.attention_bias
        else None
    ),
)
