"""Arcee: optional biases."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "arcee",
    facts=TypeFacts(
        variants=[{"attention_bias": True, "mlp_bias": True}],
    ),
)
