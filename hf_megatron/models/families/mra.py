"""MRA: its attention has a kernel of its own, and is nothing but zeros where that is not there."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("mra")
def mra(model: Any) -> ModelSpec:
    # Zeros compare nothing: what splits heads would be believed.
    return corrected_spec(model, replicated_modules=("encoder.layer.*.attention",))


register_facts(
    "mra",
    facts=TypeFacts(
        no_gradient={r"\.attention\.self\.": "read by a kernel, without which attention is zeros: compared without it"},
    ),
)
