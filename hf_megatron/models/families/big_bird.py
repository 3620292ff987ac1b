"""BigBird: heads draw random blocks of tokens sequentially, and short inputs swap the attention modules."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import UNREAD_POOLER, TypeFacts, register_facts


@register_model("big_bird")
def big_bird(model: Any) -> ModelSpec:
    # Ranks with local heads would all draw the first heads' blocks, and the swapped-in attention is not sharded.
    return corrected_spec(
        model,
        replicated_modules=("encoder.layer.*.attention", "encoder.layer.*.crossattention"),
        no_context_parallel="its sequences are padded to full blocks of tokens.",
    )


register_facts(
    "big_bird",
    facts=TypeFacts(
        min_row_length=50,
        no_gradient=UNREAD_POOLER,
    ),
)
