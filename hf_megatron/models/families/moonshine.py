"""Moonshine: speech recognition on raw waveforms."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "moonshine",
    facts=TypeFacts(
        # The default has no padding token.
        defaults={"pad_token_id": 2},
    ),
)
