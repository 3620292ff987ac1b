"""Longformer and LED: windows, and tokens that see all others."""

from ..type_facts import UNSEEN_GLOBAL_TOKENS, TypeFacts, register_facts

register_facts(
    "led",
    facts=TypeFacts(
        # A text of 13 tokens has several windows, and none of 512 to pad it to.
        tiny={"attention_window": 8},
        no_gradient=UNSEEN_GLOBAL_TOKENS,
    ),
)
register_facts(
    "longformer",
    facts=TypeFacts(
        no_gradient=UNSEEN_GLOBAL_TOKENS,
    ),
)
