"""BLIP: a text decoder with BERT layers and cross-attention to an image encoder."""

from typing import Any

from ..infer import CHUNKS
from ..registry import REGISTRY, register_model
from ..spec import ModelSpec
from ..spec_helpers import composite_family_spec, family_spec
from .blip_2 import TOWER

_LAYER = "encoder.layer.*"
_CROSS = f"{_LAYER}.crossattention"


@register_model("blip_text_model")
def blip_text_model(model: Any) -> ModelSpec:
    attentions = [f"{_LAYER}.attention"] + ([_CROSS] if model.config.is_decoder else [])
    return family_spec(
        model,
        {
            "embeddings.word_embeddings": "embedding_rowwise",
            **{f"{block}.self.{name}": "colwise" for block in attentions for name in ("query", "key", "value")},
            **{f"{block}.output.dense": "rowwise" for block in attentions},
            f"{_LAYER}.intermediate.dense": "colwise",
            f"{_LAYER}.output.dense": "rowwise",
        },
        head_plan={"cls.predictions.bias": "shard_dim_-2"},
        local_attributes={f"{block}.self": ("num_attention_heads", "all_head_size") for block in attentions},
        # No region for cross-attention: it reads two tensors, so it runs on the full sequence.
        regions={
            f"{_LAYER}.attention.self": f"{_LAYER}.attention.output.dense",
            f"{_LAYER}.intermediate": f"{_LAYER}.output.dense",
        },
        pointwise_containers=tuple(f"{_LAYER}.{block}" for block in ("attention", "attention.output", "output")),
        pre_layer_arguments=("encoder_hidden_states",) if model.config.is_decoder else (),
        no_sequence_parallel=CHUNKS if model.config.chunk_size_feed_forward else None,
    )


@register_model("blip")
def blip(model: Any) -> ModelSpec:
    encoder = {f"vision_model.encoder.layers.*.{name}": style for name, style in TOWER.items()}
    return composite_family_spec(model, REGISTRY, encoder, layers="text_decoder.bert.encoder.layer")
