"""LayoutLM: a pooler that the language model head does not use."""

from ..type_facts import UNREAD_POOLER, TypeFacts, register_facts

register_facts(
    "layoutlm",
    facts=TypeFacts(
        no_gradient=UNREAD_POOLER,
    ),
)
