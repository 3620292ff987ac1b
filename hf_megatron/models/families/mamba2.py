"""Mamba 2 mixers: B, C, norm and states are independent per group of heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_STATES = ("n_groups", "ssm_state_size")
_MIXED = (("intermediate_size",), _STATES, _STATES)
_ROWS = 0, ()
HEADS = HeadBlock(
    ("num_heads", "n_groups", "intermediate_size"),
    {
        "in_proj.weight": (0, (("intermediate_size",), *_MIXED, ("num_heads",))),
        "in_proj.bias": (0, (("intermediate_size",), *_MIXED, ("num_heads",))),
        "conv1d.weight": (0, _MIXED),
        "conv1d.bias": (0, _MIXED),
        "norm.weight": _ROWS,
        "dt_bias": _ROWS,
        "A_log": _ROWS,
        "D": _ROWS,
        "out_proj.weight": (1, ()),
    },
    summed=("out_proj.bias",),
    groups="n_groups",
    norms_of_groups=("norm",),
    lengths={"conv_dim": "conv1d.weight"},
)
# Mixers with an optional norm, and a multiplier for each output of the input projection.
HEADS_WITH_MULTIPLIERS = replace(
    HEADS, weights={**HEADS.weights, "mup_vector": (2, HEADS.weights["in_proj.weight"][1])}
)


def make_mixer_spec(mixer: str) -> Callable[[Any], ModelSpec]:
    """Returns a spec builder for models whose layers contain a Mamba 2 mixer under the given name."""
    return lambda model: corrected_spec(model, head_sharded_blocks={f"layers.*.{mixer}": HEADS})


for _model_type in ("mamba2", "nemotron_h"):
    register_model(_model_type, make_mixer_spec("mixer"))
for _model_type in ("bamba", "granitemoehybrid"):
    register_model(_model_type, make_mixer_spec("mamba"))


@register_model("falcon_h1")
def falcon_h1(model: Any) -> ModelSpec:
    # The norm has its own group count. With one group it is a norm over all heads, which has no count to divide.
    counts = ("norm.n_groups",) if model.config.mamba_rms_norm and model.config.mamba_n_groups > 1 else ()
    heads = replace(HEADS_WITH_MULTIPLIERS, counts=(*HEADS.counts, *counts))
    return corrected_spec(model, head_sharded_blocks={"layers.*.mamba": heads})


register_facts(
    "falcon_h1",
    facts=TypeFacts(
        # The default multipliers are 1, unlike in checkpoints.
        defaults={
            **{"ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.9], "mlp_multipliers": [0.75, 1.5], "key_multiplier": 0.75},
            **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.75, "attention_in_multiplier": 0.9},
            **{"attention_out_multiplier": 1.1, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.5},
        },
        tiny={"mamba_d_ssm": 128, "mamba_d_head": 16},
    ),
)
register_facts(
    "mamba2",
    facts=TypeFacts(
        # Number of heads times head size is the expanded width.
        tiny={"num_heads": 8},
    ),
)
register_facts(
    "bamba",
    facts=TypeFacts(
        # Every checkpoint has attention layers.
        variants=[{"attn_layer_indices": [9, 18, 27]}],
        batch_coupling="its z-loss includes padding, and so depends on the longest sample of the batch",
        batch_coupling_if=lambda config: bool(config.z_loss_coefficient),
    ),
)
