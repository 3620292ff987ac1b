"""EXAONE 4: attention with and without a sliding window."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "exaone4",
    facts=TypeFacts(
        variants=[{"sliding_window": None}],
    ),
)
