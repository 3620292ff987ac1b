"""LayoutLM: a pooler that no language model head reads."""

from ..type_facts import UNREAD_POOLER, TypeFacts, register_facts

register_facts(
    "layoutlm",
    facts=TypeFacts(
        no_gradient=UNREAD_POOLER,
    ),
)
