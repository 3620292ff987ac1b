"""Janus: image understanding and generation; checks train understanding only."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "janus",
    facts=TypeFacts(
        no_gradient={r"\.(vqmodel|generation_\w+)\.": "makes images: compared on those that are read"},
    ),
)
