"""Kyutai's speech to text: each linear of its attention stands in a module of its own; its codec trains nowhere."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec

_ATTENTION = "layers.*.self_attn"


@register_model("kyutai_speech_to_text")
def kyutai_speech_to_text(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "embed_tokens.embed_tokens": "vocab_embedding",
            **{f"{_ATTENTION}.{name}_proj.linear": "column" for name in "qkv"},
            f"{_ATTENTION}.o_proj.linear": "row",
            "layers.*.mlp.fc1": "packed_column",
            "layers.*.mlp.fc2": "row",
        },
        regions={_ATTENTION: f"{_ATTENTION}.o_proj.linear"},
        layers=base_prefix(model) + "layers",
        # Adds up tokens of text and of codebooks.
        on_all_stages=(base_prefix(model) + "embed_tokens",),
    )
