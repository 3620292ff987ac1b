"""Pegasus: fixed position embeddings."""

from ..type_facts import FIXED_POSITIONS, TypeFacts, register_facts

register_facts(
    "pegasus",
    facts=TypeFacts(
        no_gradient=FIXED_POSITIONS,
    ),
)
