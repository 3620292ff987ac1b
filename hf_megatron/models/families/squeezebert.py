"""SqueezeBERT: grouped linears (convolutions)."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "squeezebert",
    facts=TypeFacts(
        # Must be divisible by the number of groups.
        tiny={"intermediate_size": 96},
    ),
)
