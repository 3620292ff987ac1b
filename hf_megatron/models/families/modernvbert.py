"""ModernVBERT: a SigLIP image encoder."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "modernvbert",
    facts=TypeFacts(
        # The default has a pooling head that is not used.
        defaults={"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
    ),
)
