"""Nemotron: an explicit number of key/value heads."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "nemotron",
    facts=TypeFacts(
        # The default has no number of key/value heads, which the attention reads.
        defaults={"num_key_value_heads": 48},
    ),
)
