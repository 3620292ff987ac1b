"""Mellum: layers with and without a sliding window."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "mellum",
    facts=TypeFacts(
        # The default has no sliding-window layers, hence only one kind of rotary embedding.
        defaults={"layer_types": ["full_attention", "sliding_attention"] * 14},
    ),
)
