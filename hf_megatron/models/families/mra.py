"""MRA: attention uses a custom kernel, and returns zeros if the kernel is not available."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("mra")
def mra(model: Any) -> ModelSpec:
    # Without the kernel the output is zero for any sharding, so a check of sharded heads would pass vacuously.
    return corrected_spec(model, replicated_modules=("encoder.layer.*.attention",))


register_facts(
    "mra",
    facts=TypeFacts(
        no_gradient={r"\.attention\.self\.": "read by a kernel, without which attention is zeros: compared without it"},
    ),
)
