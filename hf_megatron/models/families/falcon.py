"""Falcon: three layouts of the fused query/key/value, with rotary positions or alibi.

The new architecture stores groups, each with its queries, its key and its value; the old one without multi-query stores
heads. Both are sharded by group or head. The old one with multi-query (falcon-7b) stores all queries, then the one
shared key and value: this is not a split along one dim, and falcon-7b has 71 heads, which no tp size divides. Its
attention is therefore replicated; the MLP, the embedding and the head are sharded.
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
        # With ALiBi the attention mask contains the per-head bias.
        local_arguments={"h.*.self_attention": ("alibi", "attention_mask")} if splits and config.alibi else {},
        plain_linear_classes=("FalconLinear",),
        no_sequence_parallel=(
            "attention is replicated and would draw a different dropout mask on every rank; set attention_dropout=0."
            if config.alibi and not splits and config.attention_dropout > 0
            else None
        ),
    )


register_facts(
    "falcon",
    facts=TypeFacts(
        # New architecture as in 40B, then as in 11B; RW; old architecture without multi-query.
        variants=[
            {"new_decoder_architecture": True, "num_kv_heads": 8},
            {"new_decoder_architecture": True, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1},
            {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
            {"multi_query": False},
        ],
    ),
)
