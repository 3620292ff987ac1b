"""InternLM 3: biases that its config switches on."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "internlm3",
    facts=TypeFacts(
        variants=[{"qkv_bias": True}],
    ),
)
