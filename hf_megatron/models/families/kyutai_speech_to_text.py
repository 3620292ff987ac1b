"""Kyutai speech-to-text: attention linears are wrapped in modules; the audio codec gets no gradient."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts

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
        # Sums the embeddings of text and codebook tokens.
        run_on_all_stages=(base_prefix(model) + "embed_tokens",),
    )


register_facts(
    "kyutai_speech_to_text",
    facts=TypeFacts(
        # Vocabulary: text tokens, four codebooks of 17 tokens and a padding token.
        tiny={
            **{"num_codebooks": 4, "codebook_vocab_size": 17, "audio_bos_token_id": 16, "audio_pad_token_id": 199},
        },
        no_gradient={r"^codec_model\.": "makes tokens of clips in generate() alone"},
    ),
)
