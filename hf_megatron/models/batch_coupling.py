"""Types in whose forward the rows of a batch depend on each other: a part of a batch gives other numbers there."""

from typing import Any

from .type_facts import facts_of


def batch_coupling_reason(config: Any) -> str | None:
    """Says why a model's rows cannot be computed apart from each other, or `None` where they can."""
    facts = facts_of(config.model_type)
    is_coupled = facts.batch_coupling_if is None or facts.batch_coupling_if(config)
    return facts.batch_coupling if is_coupled else None
