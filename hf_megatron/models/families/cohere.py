"""Cohere language models, alone and with an image encoder."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "cohere2_vision",
    facts=TypeFacts(
        # The default has a pooling head that is not used.
        defaults={
            "vision_config": {
                **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 3072},
                **{"image_size": 512, "num_hidden_layers": 27, "num_attention_heads": 12, "vision_use_head": False},
            }
        },
    ),
)
register_facts(
    "cohere_compass_text",
    facts=TypeFacts(
        # The default has no rotary parameters, but the model reads them for every layer type.
        defaults={
            "layer_types": ["sliding_attention", "full_attention"] * 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": None,
            },
        },
    ),
)
register_facts(
    "cohere",
    facts=TypeFacts(
        variants=[{"use_qk_norm": True}, {"attention_bias": True}],
    ),
)
register_facts(
    "cohere2",
    facts=TypeFacts(
        variants=[{"attention_bias": True}],
    ),
)
