"""Moonshine: speech recognition on samples."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "moonshine",
    facts=TypeFacts(
        # No token of padding by default.
        defaults={"pad_token_id": 2},
    ),
)
