"""Mamba2: state space mixers only, as in megatron-core's MambaModel."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import Arguments, Family, fused_norm
from .state_space import StateSpace, limited_steps, mixer, unsupported_mixer_reason


def _space(config: Any) -> StateSpace:
    return StateSpace(config.num_heads, config.head_dim, config.n_groups, config.state_size)


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    yield from fused_norm(f"{source}.norm", f"{target}.mixer.in_proj")
    yield from mixer(f"{source}.mixer", f"{target}.mixer")


def _arguments(config: Any) -> Arguments:
    return {
        **_space(config).arguments(),
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": config.layer_norm_epsilon,
        "add_bias_linear": False,
        "hybrid_override_pattern": "M" * config.num_hidden_layers,
    }


def _unstored(config: Any) -> Iterator[str]:
    yield from limited_steps(*config.time_step_limit)
    if config.residual_in_fp32:
        yield "residual_in_fp32, which Megatron-Core's MambaStack does not set; results are equal in fp32"


FAMILY = Family(
    model_types=("mamba2",),
    layer=_layer,
    arguments=_arguments,
    gated=False,
    unsupported_reason=lambda config: unsupported_mixer_reason(config, "hidden_act"),
    embedding="backbone.embeddings",
    layers="backbone.layers",
    norm="backbone.norm_f",
    final_norm="final_norm",
    sizes=lambda config: _space(config).sizes(),
    blocks=lambda config: _space(config).blocks(),
    stacked=False,
    own_unstored=_unstored,
)
