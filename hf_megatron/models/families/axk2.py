"""A.X K2: sparse attention with an indexer."""

from ..type_facts import SPARSE_INDEXER, TypeFacts, register_facts

register_facts(
    "axk2",
    facts=TypeFacts(
        no_gradient=SPARSE_INDEXER,
    ),
)
