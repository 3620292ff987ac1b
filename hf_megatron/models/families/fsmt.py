"""FSMT: rows are in the second dim of its layers, the one that is split; a table of tokens passes for a head."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import FIXED_POSITIONS, TypeFacts, register_facts


@register_model("fsmt")
def fsmt(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.embed_tokens",))


register_facts(
    "fsmt",
    facts=TypeFacts(
        needs_decoder_inputs=True,
        no_gradient=FIXED_POSITIONS,
    ),
)
