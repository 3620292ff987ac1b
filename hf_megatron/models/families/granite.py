"""Granite: dense, hybrid, document and speech models."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "granitemoehybrid",
    facts=TypeFacts(
        # The default has no attention layers.
        defaults={"layer_types": ["linear_attention", "full_attention"] * 16},
    ),
)
register_facts(
    "granite_speech_encoder",
    "granite_speech_plus_encoder",
    facts=TypeFacts(
        tiny={"hidden_dim": 64, "input_dim": 16, "dim_head": 16, "context_size": 8, "max_pos_emb": 16},
    ),
)
register_facts(
    "granite_docling",
    facts=TypeFacts(
        no_gradient={r"\.connector\.fine\.": "reads tiles of which the batch says that they are fine"},
    ),
)
register_facts(
    "granite",
    facts=TypeFacts(
        variants=[{"attention_bias": True}, {"num_key_value_heads": 8}],
    ),
)
