"""Mellum: layers with and without a window."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "mellum",
    facts=TypeFacts(
        # No sliding layer by default, hence one kind of rotary embedding only.
        defaults={"layer_types": ["full_attention", "sliding_attention"] * 14},
    ),
)
