"""ModernVBERT: an image tower of SigLIP."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "modernvbert",
    facts=TypeFacts(
        # A head by default that nobody reads.
        defaults={"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
    ),
)
