"""Relatives of BART that look for the last label of each row."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "mbart",
    "plbart",
    facts=TypeFacts(
        needs_a_label=True,
    ),
)
