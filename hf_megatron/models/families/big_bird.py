"""BigBird: its heads draw blocks of tokens one after another, and short texts exchange the attention of a model."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import UNREAD_POOLER, TypeFacts, register_facts


@register_model("big_bird")
def big_bird(model: Any) -> ModelSpec:
    # Some of the heads alone would draw what others do, and a new attention knows of no part of its heads.
    return corrected_spec(
        model,
        replicated_modules=("encoder.layer.*.attention", "encoder.layer.*.crossattention"),
        no_context_parallel="its rows are padded to whole blocks of tokens.",
    )


register_facts(
    "big_bird",
    facts=TypeFacts(
        min_row_length=50,
        no_gradient=UNREAD_POOLER,
    ),
)
