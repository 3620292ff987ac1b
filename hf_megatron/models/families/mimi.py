"""Mimi: a codec of sounds."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "mimi",
    facts=TypeFacts(
        # A group of channels for each of the narrow states.
        tiny={"upsample_groups": 64},
    ),
)
