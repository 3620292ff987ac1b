"""Longformer and LED: windowed attention with global tokens."""

from ..type_facts import UNSEEN_GLOBAL_TOKENS, TypeFacts, register_facts

register_facts(
    "led",
    facts=TypeFacts(
        # 13 tokens span several windows of this size and are not padded to a window of 512.
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
