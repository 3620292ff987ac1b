"""Voxtral: an encoder of sounds of Whisper's kind."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "voxtral",
    facts=TypeFacts(
        # No placeholder by default.
        defaults={"audio_token_id": 24},
    ),
)
register_facts(
    "voxtral_encoder",
    facts=TypeFacts(
        # Takes twice as many frames as positions.
        tiny={"intermediate_size": 256, "max_source_positions": 16},
    ),
)
