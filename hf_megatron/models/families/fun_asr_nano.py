"""Fun-ASR-Nano: an adaptor between audio encoder and language model."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "fun_asr_nano",
    facts=TypeFacts(
        tiny={
            "adaptor_config": {
                **{"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 16, "num_hidden_layers": 2},
                "projector_hidden_size": 92,
            }
        },
    ),
)
