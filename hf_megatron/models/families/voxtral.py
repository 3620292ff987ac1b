"""Voxtral: a Whisper-style audio encoder."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "voxtral",
    facts=TypeFacts(
        # The default has no placeholder token.
        defaults={"audio_token_id": 24},
    ),
)
register_facts(
    "voxtral_encoder",
    facts=TypeFacts(
        # Reads twice as many frames as it has positions.
        tiny={"intermediate_size": 256, "max_source_positions": 16},
    ),
)
