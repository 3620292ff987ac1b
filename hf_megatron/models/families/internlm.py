"""InternLM 3: optional biases."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "internlm3",
    facts=TypeFacts(
        variants=[{"qkv_bias": True}],
    ),
)
