"""Laguna: per-layer numbers of heads."""

from ..type_facts import EXPERT_CHOICE, TypeFacts, register_facts

register_facts(
    "laguna",
    facts=TypeFacts(
        # The default has no sliding-window layers, hence only one kind of rotary embedding.
        defaults={
            "layer_types": ["full_attention", "sliding_attention"] * 20,
            "num_attention_heads_per_layer": [48, 64] * 20,
        },
        no_gradient=EXPERT_CHOICE,
    ),
)
