"""BLIP: a text decoder with BERT's layers, each of which attends to a tower of images."""

from typing import Any

from ..infer import CHUNKS
from ..registry import REGISTRY, register_model
from ..spec import ModelSpec
from ..spec_helpers import around_text_spec, family_spec
from .blip_2 import TOWER

_LAYER = "encoder.layer.*"
_CROSS = f"{_LAYER}.crossattention"


@register_model("blip_text_model")
def blip_text_model(model: Any) -> ModelSpec:
    attentions = [f"{_LAYER}.attention"] + ([_CROSS] if model.config.is_decoder else [])
    return family_spec(
        model,
        {
            "embeddings.word_embeddings": "vocab_embedding",
            **{f"{block}.self.{name}": "column" for block in attentions for name in ("query", "key", "value")},
            **{f"{block}.output.dense": "row" for block in attentions},
            f"{_LAYER}.intermediate.dense": "column",
            f"{_LAYER}.output.dense": "row",
        },
        head_plan={"cls.predictions.bias": "split_rows"},
        local_attributes={f"{block}.self": ("num_attention_heads", "all_head_size") for block in attentions},
        # Cross attention reads two tensors: with a split sequence it is computed on all of it.
        regions={
            f"{_LAYER}.attention.self": f"{_LAYER}.attention.output.dense",
            f"{_LAYER}.intermediate": f"{_LAYER}.output.dense",
        },
        transparent=tuple(f"{_LAYER}.{block}" for block in ("attention", "attention.output", "output")),
        early_arguments=("encoder_hidden_states",) if model.config.is_decoder else (),
        no_sequence_parallel=CHUNKS if model.config.chunk_size_feed_forward else None,
    )


@register_model("blip")
def blip(model: Any) -> ModelSpec:
    tower = {f"vision_model.encoder.layers.*.{name}": style for name, style in TOWER.items()}
    return around_text_spec(model, REGISTRY, tower, layers="text_decoder.bert.encoder.layer")
