"""SqueezeBERT: linears divided into groups."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "squeezebert",
    facts=TypeFacts(
        # Divided into groups.
        tiny={"intermediate_size": 96},
    ),
)
