"""BigBird-Pegasus: encoder heads draw random blocks of tokens sequentially; the final norm has an unusual name."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("bigbird_pegasus")
def bigbird_pegasus(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        # Ranks with local heads would all draw the first heads' blocks, and short inputs swap the attention modules.
        replicated_modules=("encoder.layers.*.self_attn",),
        # It runs after the layers, while the norm of this name in BART runs before them.
        after_layers=("decoder.layernorm_embedding",),
    )


register_facts(
    "bigbird_pegasus",
    facts=TypeFacts(
        min_row_length=50,
    ),
)
