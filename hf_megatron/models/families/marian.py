"""Marian: fixed position embeddings."""

from ..type_facts import FIXED_POSITIONS, TypeFacts, register_facts

register_facts(
    "marian",
    facts=TypeFacts(
        no_gradient=FIXED_POSITIONS,
    ),
)
