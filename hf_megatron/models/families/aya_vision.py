"""Aya Vision: a SigLIP image encoder."""

from ..type_facts import UNREAD_LAST_NORM, TypeFacts, register_facts

register_facts(
    "aya_vision",
    facts=TypeFacts(
        # The default number of heads does not divide the width of the vision encoder.
        defaults={
            "vision_config": {
                **{
                    "model_type": "siglip_vision_model",
                    "hidden_size": 1152,
                    "intermediate_size": 4304,
                    "patch_size": 14,
                },
                **{"image_size": 364, "num_hidden_layers": 26, "num_attention_heads": 16, "vision_use_head": False},
            }
        },
        no_gradient=UNREAD_LAST_NORM,
    ),
)
