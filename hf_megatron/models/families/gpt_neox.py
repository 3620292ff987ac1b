"""GPT-NeoX: parallel or sequential residuals."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "gpt_neox",
    facts=TypeFacts(
        variants=[{"use_parallel_residual": False}, {"attention_bias": False}],
    ),
)
