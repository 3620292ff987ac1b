"""ERNIE 4.5: dense, MoE and vision-language models."""

from ..type_facts import EXPERT_CHOICE, TypeFacts, register_facts

register_facts(
    "ernie4_5_vl_moe_text",
    facts=TypeFacts(
        # The default has no M-RoPE sections; the model then assumes the sections of a wide head.
        defaults={
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]},
        },
        no_gradient=EXPERT_CHOICE,
    ),
)
register_facts(
    "ernie4_5_moe",
    facts=TypeFacts(
        no_gradient=EXPERT_CHOICE,
    ),
)
register_facts(
    "ernie4_5",
    facts=TypeFacts(
        variants=[{"use_bias": True}],
    ),
)
