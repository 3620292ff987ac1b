"""Cohere speech recognition: the decoder defines modules after its layers that run before them."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("cohere_asr")
def cohere_asr(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.pos_emb",), after_encoder=("decoder.proj",))


register_facts(
    "cohere_asr",
    facts=TypeFacts(
        # Every checkpoint sets it; the label shift needs it.
        defaults={"decoder_start_token_id": 0},
    ),
)
