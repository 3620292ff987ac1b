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
            "embed_tokens.embed_tokens": "embedding_rowwise",
            **{f"{_ATTENTION}.{name}_proj.linear": "colwise" for name in "qkv"},
            f"{_ATTENTION}.o_proj.linear": "rowwise",
            "layers.*.mlp.fc1": "packed_colwise",
            "layers.*.mlp.fc2": "rowwise",
        },
        regions={_ATTENTION: f"{_ATTENTION}.o_proj.linear"},
        layers=base_prefix(model) + "layers",
        # Adds up tokens of text and of codebooks.
        run_on_all_stages=(base_prefix(model) + "embed_tokens",),
    )
