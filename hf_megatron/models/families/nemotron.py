"""Nemotron: a number of key/value heads of its own."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "nemotron",
    facts=TypeFacts(
        # No number of key/value heads by default, which the attention reads.
        defaults={"num_key_value_heads": 48},
    ),
)
