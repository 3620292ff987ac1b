"""NLLB-MoE: experts with a capacity limit per batch."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "nllb-moe",
    facts=TypeFacts(
        no_gradient={r"\.expert_(?![01]\.)\d+\.": "chosen by no token: masks are read as the numbers of two experts"},
        batch_coupling="the capacity of its experts depends on the number of tokens in the batch",
    ),
)
