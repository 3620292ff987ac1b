"""Laguna: numbers of heads that differ between layers."""

from ..type_facts import EXPERT_CHOICE, TypeFacts, register_facts

register_facts(
    "laguna",
    facts=TypeFacts(
        # No sliding layer by default, hence one kind of rotary embedding only.
        defaults={
            "layer_types": ["full_attention", "sliding_attention"] * 20,
            "num_attention_heads_per_layer": [48, 64] * 20,
        },
        no_gradient=EXPERT_CHOICE,
    ),
)
