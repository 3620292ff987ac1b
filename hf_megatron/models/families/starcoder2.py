"""StarCoder 2: sliding windows and optional biases."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "starcoder2",
    facts=TypeFacts(
        variants=[{"sliding_window": 4096}, {"use_bias": False}],
    ),
)
