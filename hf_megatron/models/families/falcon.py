"""Falcon: three layouts of the fused query/key/value, with rotary positions or alibi.

New architecture: one group after the other, each with its queries, its key and its value. Old without multi-query: one
head after the other. Both are split between groups or heads. Old with multi-query (falcon-7b): all queries, then the
one key and value that all of them share. A split of that would be no split of the tensor, and falcon-7b has 71 heads,
which no tp size divides, so attention is computed whole on every rank; the MLP, the embedding and the head are split.
"""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("falcon")
def falcon(model: Any) -> ModelSpec:
    config = model.config
    attention = {
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
    }
    splits = config.new_decoder_architecture or not config.multi_query
    return family_spec(
        model,
        {
            "word_embeddings": "embedding_rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        }
        | (attention if splits else {}),
        local_attributes={"h.*.self_attention": ("num_heads", "num_kv_heads")} if splits else {},
        # With alibi the mask carries it.
        local_arguments={"h.*.self_attention": ("alibi", "attention_mask")} if splits and config.alibi else {},
        plain_linear_classes=("FalconLinear",),
        no_sequence_parallel=(
            "attention is computed whole and would draw another dropout mask on every rank; set attention_dropout=0."
            if config.alibi and not splits and config.attention_dropout > 0
            else None
        ),
    )


register_facts(
    "falcon",
    facts=TypeFacts(
        # 40B; RW; 11B.
        variants=[
            {"new_decoder_architecture": True, "num_kv_heads": 8},
            {"new_decoder_architecture": True, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1},
            {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
            {"multi_query": False},
        ],
    ),
)
