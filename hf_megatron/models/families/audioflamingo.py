"""Audio Flamingo and Music Flamingo: audio encoder sizes."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "audioflamingo3_encoder",
    facts=TypeFacts(
        tiny={"max_source_positions": 16},
    ),
)
register_facts(
    "musicflamingo",
    facts=TypeFacts(
        # The base of its rotary time embedding is also the largest time.
        tiny={
            "rope_parameters": {"rope_theta": 64.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
            "max_position_embeddings": 64.0,
        },
    ),
)
