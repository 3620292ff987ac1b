"""Whisper and variants: encoders with a maximum number of frames."""

from ..type_facts import FIXED_POSITIONS, TypeFacts, register_facts

register_facts(
    "moss_transcribe_diarize_audio",
    "whisper",
    facts=TypeFacts(
        tiny={"max_source_positions": 16},
    ),
)
register_facts(
    "speech_to_text",
    facts=TypeFacts(
        tiny={"max_source_positions": 16},
        no_gradient=FIXED_POSITIONS,
    ),
)
