"""TAPAS: embeddings of table rows and columns."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "tapas",
    facts=TypeFacts(
        tiny={"type_vocab_sizes": [3, 12, 12, 2, 12, 12, 10]},
    ),
)
