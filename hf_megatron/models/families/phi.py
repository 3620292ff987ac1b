"""Phi: the per-head norms of `qk_layernorm` see the local heads only."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("phi")
def phi(model: Any) -> ModelSpec:
    norms = ("q_layernorm", "k_layernorm")
    return corrected_spec(model, {f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce" for norm in norms})


register_facts(
    "phi",
    facts=TypeFacts(
        variants=[{"qk_layernorm": True}],
    ),
)
register_facts(
    "phi3",
    facts=TypeFacts(
        variants=[{"sliding_window": 2047}, {"num_key_value_heads": 8}],
    ),
)
