"""Llama: biases and key/value head counts of popular checkpoints."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "llama",
    facts=TypeFacts(
        variants=[
            {"attention_bias": True},
            {"mlp_bias": True},
            {"attention_bias": True, "mlp_bias": True},
            {"attention_bias": True, "num_key_value_heads": 8},
            {"num_key_value_heads": 8},
            {"num_key_value_heads": 1},
        ],
    ),
)
