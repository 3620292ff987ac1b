"""Nemotron-H, Nemotron Nano 2 and 3: each layer is a state space mixer, attention, an MLP or an MoE block."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import Arguments, Family, common_arguments, fused_norm, qkv, renamed
from .state_space import StateSpace, limited_steps, mixer, unsupported_mixer_reason

_ACTIVATION = "relu2"


def _space(config: Any) -> StateSpace:
    return StateSpace(config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    kind, norm, inner = config.layers_block_type[number], f"{source}.norm", f"{source}.mixer"
    mlp, attention = f"{target}.mlp", f"{target}.self_attention"
    if kind == "linear_attention":
        yield from fused_norm(norm, f"{target}.mixer.in_proj")
        yield from mixer(inner, f"{target}.mixer")
    elif kind == "full_attention":
        yield from fused_norm(norm, f"{attention}.linear_qkv")
        names = tuple(f"{inner}.{part}_proj.weight" for part in "qkv")
        yield Rule(names, (f"{attention}.linear_qkv.weight",), qkv(config))
        yield from renamed(f"{inner}.o_proj", f"{attention}.linear_proj")
    elif kind == "mlp":
        yield from fused_norm(norm, f"{mlp}.linear_fc1")
        yield from _linears(inner, mlp)
    else:
        yield from _experts(config, norm, inner, f"{target}.pre_mlp_layernorm", mlp)


def _linears(source: str, target: str) -> Iterator[Rule]:
    yield from renamed(f"{source}.up_proj", f"{target}.linear_fc1")
    yield from renamed(f"{source}.down_proj", f"{target}.linear_fc2")


def _experts(config: Any, norm: str, source: str, target_norm: str, target: str) -> Iterator[Rule]:
    yield from renamed(norm, target_norm)
    yield from renamed(f"{source}.gate", f"{target}.router")
    yield Rule((f"{source}.gate.e_score_correction_bias",), (f"{target}.router.expert_bias",))
    for part, linear in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        yield Rule((f"{source}.experts.{part}",), (f"{target}.experts.experts.{linear}.weight",))
    yield from _linears(f"{source}.shared_experts", f"{target}.shared_experts")
    for part in ("fc1_latent_proj", "fc2_latent_proj") if config.moe_latent_size else ():
        yield from renamed(f"{source}.{part}", f"{target}.{part}")


def _expert_arguments(config: Any) -> Arguments:
    groups = {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return {
        "num_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **(groups if config.n_group > 1 else {}),
    }


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        **_space(config).arguments(),
        ffn_hidden_size=config.intermediate_size,
        norm_epsilon=config.layer_norm_epsilon,
        add_bias_linear=False,
        squared_relu=True,
        is_hybrid_model=True,
        hybrid_override_pattern=config.hybrid_override_pattern,
        **(_expert_arguments(config) if "moe" in config.layers_block_type else {}),
    )


def _unsupported_reason(config: Any) -> str | None:
    if config.mlp_bias:
        return "mlp_bias: Megatron-Core's add_bias_linear would add biases to attention too"
    if config.mlp_hidden_act != _ACTIVATION:
        return f"mlp_hidden_act={config.mlp_hidden_act}: expected {_ACTIVATION} (Megatron's squared_relu)"
    if "moe" in config.layers_block_type and config.norm_topk_prob is not (config.num_experts_per_tok > 1):
        return "norm_topk_prob: Megatron-Core normalizes expert weights if, and only if, a token has several experts"
    return unsupported_mixer_reason(config, "mamba_hidden_act")


FAMILY = Family(
    model_types=("nemotron_h",),
    layer=_layer,
    arguments=_arguments,
    gated=False,
    unchecked=lambda config: (
        "experts with moe_latent_size need TransformerEngine in Megatron-Core" if config.moe_latent_size else None
    ),
    unsupported_reason=_unsupported_reason,
    embedding="model.embeddings",
    norm="model.norm_f",
    final_norm="final_norm",
    sizes=lambda config: _space(config).sizes(),
    blocks=lambda config: _space(config).blocks(),
    stacked=False,
    own_unstored=lambda config: limited_steps(config.time_step_min, float("inf")),
)
