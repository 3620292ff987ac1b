"""Doge: attention is replicated, because its dynamic mask mixes the values of all heads (`dt_proj`)."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("doge")
def doge(model: Any) -> ModelSpec:
    linears = ("q_proj", "k_proj", "v_proj", "dt_proj", "o_proj")
    return corrected_spec(
        model,
        {f"layers.*.self_attn.{name}": "replicated" for name in linears},
        # The dynamic mask depends on the values of all tokens.
        full_sequence_blocks=("layers.*.self_attn",),
    )


register_facts(
    "doge",
    facts=TypeFacts(
        batch_coupling="its router pairs tokens of different samples",
        batch_coupling_if=lambda config: config.is_moe,
    ),
)
