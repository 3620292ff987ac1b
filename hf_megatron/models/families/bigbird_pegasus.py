"""BigBird-Pegasus: its encoder's heads draw blocks of tokens one after another; a norm has the name of BART's."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("bigbird_pegasus")
def bigbird_pegasus(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        # Some of the heads alone would draw what others do, and short texts exchange the attention.
        replicated_modules=("encoder.layers.*.self_attn",),
        # Behind its layers, where BART's stands before them.
        after_layers=("decoder.layernorm_embedding",),
    )


register_facts(
    "bigbird_pegasus",
    facts=TypeFacts(
        min_row_length=50,
    ),
)
