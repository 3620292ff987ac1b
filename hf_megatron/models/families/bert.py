"""BERT: the row linears stand in modules of their own, beside the residual; the head's bias is tied to its parent's."""

from typing import Any

from ..infer import CHUNKS
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec


@register_model("bert")
def bert(model: Any) -> ModelSpec:
    config = model.config
    cross = "encoder.layer.*.crossattention"
    styles = {"self.query": "column", "self.key": "column", "self.value": "column", "output.dense": "row"}
    # Beside a decoder's own attention.
    reads_encoder = bool(config.add_cross_attention)
    return family_spec(
        model,
        {
            "embeddings.word_embeddings": "vocab_embedding",
            "encoder.layer.*.attention.self.query": "column",
            "encoder.layer.*.attention.self.key": "column",
            "encoder.layer.*.attention.self.value": "column",
            "encoder.layer.*.attention.output.dense": "row",
            "encoder.layer.*.intermediate.dense": "column",
            "encoder.layer.*.output.dense": "row",
            **({f"{cross}.{name}": style for name, style in styles.items()} if reads_encoder else {}),
        },
        head_plan={"cls.predictions.bias": "split_rows"},
        local_attributes={
            f"{attention}.self": ("num_attention_heads", "all_head_size")
            for attention in ("encoder.layer.*.attention", *([cross] if reads_encoder else []))
        },
        several_inputs=(f"{cross}.self",) if reads_encoder else (),
        regions={
            "encoder.layer.*.attention.self": "encoder.layer.*.attention.output.dense",
            "encoder.layer.*.intermediate": "encoder.layer.*.output.dense",
        },
        transparent=("encoder.layer.*.attention", "encoder.layer.*.attention.output", "encoder.layer.*.output"),
        no_sequence_parallel=CHUNKS if config.chunk_size_feed_forward else None,
    )
