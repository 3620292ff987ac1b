"""MusicGen decoder: cross-attention reads a separate prompt."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("musicgen_decoder")
def musicgen_decoder(model: Any) -> ModelSpec:
    return corrected_spec(
        model, no_context_parallel=("the tokens of its prompt cannot be sharded over context-parallel ranks.")
    )


register_facts(
    "musicgen_decoder",
    "musicgen_melody_decoder",
    facts=TypeFacts(
        reads_codebooks=True,
    ),
)
