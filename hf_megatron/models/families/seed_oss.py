"""Seed-OSS: optional biases."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "seed_oss",
    facts=TypeFacts(
        variants=[{"attention_bias": False}, {"attention_out_bias": True}],
    ),
)
