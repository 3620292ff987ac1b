"""DeepSeek VL: image encoders whose pooling head is not used."""

from ..type_facts import TypeFacts, register_facts

_POOLED = {r"\.vision_model\.head\.": "pools the states of the tower, which are read as they are"}

register_facts(
    "deepseek_vl",
    "deepseek_vl_hybrid",
    facts=TypeFacts(
        no_gradient=_POOLED,
    ),
)
