"""BART variants whose label shift looks for the last label of each sequence."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "mbart",
    "plbart",
    facts=TypeFacts(
        needs_a_label=True,
    ),
)
