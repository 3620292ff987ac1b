"""GIT: BERT layers over an image encoder, whose features are prepended to the text."""

from typing import Any

from ..infer import CHUNKS
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec

_LAYER, _TOWER = "encoder.layer.*", "image_encoder.vision_model.encoder.layers.*"


@register_model("git")
def git(model: Any) -> ModelSpec:
    layers = f"{base_prefix(model)}encoder.layer"
    return family_spec(
        model,
        {
            "embeddings.word_embeddings": "embedding_rowwise",
            **{f"{_LAYER}.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
            f"{_LAYER}.attention.output.dense": "rowwise",
            f"{_LAYER}.intermediate.dense": "colwise",
            f"{_LAYER}.output.dense": "rowwise",
            **{f"{_TOWER}.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
            f"{_TOWER}.self_attn.out_proj": "rowwise",
            f"{_TOWER}.mlp.fc1": "colwise",
            f"{_TOWER}.mlp.fc2": "rowwise",
        },
        local_attributes={f"{_LAYER}.attention.self": ("num_attention_heads", "all_head_size")},
        regions={
            f"{_LAYER}.attention.self": f"{_LAYER}.attention.output.dense",
            f"{_LAYER}.intermediate": f"{_LAYER}.output.dense",
        },
        pointwise_containers=tuple(f"{_LAYER}.{block}" for block in ("attention", "attention.output", "output")),
        no_sequence_parallel=CHUNKS if model.config.chunk_size_feed_forward else None,
        layer_stacks=(layers,),
        layers=layers,
        prefix_modules=tuple(base_prefix(model) + name for name in ("image_encoder", "visual_projection")),
    )
