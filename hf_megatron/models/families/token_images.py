"""Chameleon and Emu3: images are tokenized into the vocabulary; transformers has no plan for the decoder layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec, gated_decoder_plan
from ..type_facts import IMAGE_CODES, IMAGE_TOKENIZER, TypeFacts, register_facts


@register_model("emu3_text_model")
def emu3_text(model: Any) -> ModelSpec:
    return family_spec(model, gated_decoder_plan())


@register_model("chameleon")
def chameleon(model: Any) -> ModelSpec:
    # Per-head norm weights, sharded by head.
    prefix = base_prefix(model)
    norms = {f"layers.*.self_attn.{name}_norm.{part}": "shard_dim_-2" for name in "qk" for part in ("weight", "bias")}
    return family_spec(
        model,
        gated_decoder_plan() | norms,
        local_attributes={"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
        layers=f"{prefix}layers",
        before_layers=(f"{prefix}vqmodel",),
    )


register_facts(
    "chameleon",
    facts=TypeFacts(
        # The default has no vocabulary map, which lists the image tokens.
        defaults={
            "image_token_id": 100,
            "vocabulary_map": {
                "<image>": 100,
                **{f"IMGIMG{chr(65 + code)}Z": 101 + code for code in range(IMAGE_CODES)},
            },
        },
        no_gradient=IMAGE_TOKENIZER,
    ),
)
register_facts(
    "emu3",
    facts=TypeFacts(
        # The default has no vocabulary map, which lists the image tokens.
        defaults={
            "image_token_id": 100,
            "vocabulary_map": {
                **{"<image>": 100, "<|extra_200|>": 101},
                **{f"<|visual token {code:06d}|>": 102 + code for code in range(IMAGE_CODES)},
            },
        },
        no_gradient=IMAGE_TOKENIZER,
        frozen=("model.vqmodel",),
    ),
)
