"""Mimi: an audio codec."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "mimi",
    facts=TypeFacts(
        # One group of channels per feature of the tiny hidden size.
        tiny={"upsample_groups": 64},
    ),
)
