"""FSMT: the decoder embedding doubles as the output head.

Layers run on `[sequence, batch, hidden]`, so sequence parallelism splits the batch in dim 1.
"""

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
