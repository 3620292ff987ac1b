"""OLMo and OLMoE: clipped projections and key/value head counts."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "olmo",
    facts=TypeFacts(
        variants=[{"clip_qkv": 8.0}, {"num_key_value_heads": 8}],
    ),
)
register_facts(
    "olmo2",
    facts=TypeFacts(
        variants=[{"num_key_value_heads": 8}],
    ),
)
register_facts(
    "olmoe",
    facts=TypeFacts(
        variants=[{"clip_qkv": 8.0}, {"norm_topk_prob": True}],
    ),
)
