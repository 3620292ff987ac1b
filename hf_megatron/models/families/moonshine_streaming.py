"""Moonshine Streaming: the convolutions before the encoder layers compute the layers' attention mask."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("moonshine_streaming")
def moonshine_streaming(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        run_on_all_stages=(base_prefix(model) + "encoder.embedder",),
        after_encoder=("decoder.pos_emb", "decoder.proj"),
    )


register_facts(
    "moonshine_streaming",
    facts=TypeFacts(
        # The default has no number of key/value heads, which the attention reads.
        defaults={"decoder_start_token_id": 0, "num_key_value_heads": 8},
    ),
)
