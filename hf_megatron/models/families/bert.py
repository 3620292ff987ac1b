"""BERT: row-parallel linears are in separate modules with the residual; the head's bias is tied to its parent's."""

from typing import Any

from ..infer import CHUNKS
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("bert")
def bert(model: Any) -> ModelSpec:
    config = model.config
    cross = "encoder.layer.*.crossattention"
    styles = {"self.query": "colwise", "self.key": "colwise", "self.value": "colwise", "output.dense": "rowwise"}
    # Decoders may have cross-attention in addition to self-attention.
    reads_encoder = bool(config.add_cross_attention)
    return family_spec(
        model,
        {
            "embeddings.word_embeddings": "embedding_rowwise",
            "encoder.layer.*.attention.self.query": "colwise",
            "encoder.layer.*.attention.self.key": "colwise",
            "encoder.layer.*.attention.self.value": "colwise",
            "encoder.layer.*.attention.output.dense": "rowwise",
            "encoder.layer.*.intermediate.dense": "colwise",
            "encoder.layer.*.output.dense": "rowwise",
            **({f"{cross}.{name}": style for name, style in styles.items()} if reads_encoder else {}),
        },
        head_plan={"cls.predictions.bias": "shard_dim_-2"},
        local_attributes={
            f"{attention}.self": ("num_attention_heads", "all_head_size")
            for attention in ("encoder.layer.*.attention", *([cross] if reads_encoder else []))
        },
        multi_input_blocks=(f"{cross}.self",) if reads_encoder else (),
        regions={
            "encoder.layer.*.attention.self": "encoder.layer.*.attention.output.dense",
            "encoder.layer.*.intermediate": "encoder.layer.*.output.dense",
        },
        pointwise_containers=(
            "encoder.layer.*.attention",
            "encoder.layer.*.attention.output",
            "encoder.layer.*.output",
        ),
        no_sequence_parallel=CHUNKS if config.chunk_size_feed_forward else None,
    )
