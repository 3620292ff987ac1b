"""BLOOM: one fused linear, grouped by head; the model computes ALiBi for all heads."""

from typing import Any

from ...errors import UnsupportedError
from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("bloom")
def bloom(model: Any) -> ModelSpec:
    if model.config.pretraining_tp > 1 and model.config.slow_but_exact:
        raise UnsupportedError(
            "bloom with slow_but_exact=True is not supported: it slices the weights of row-parallel linears itself. "
            "Set slow_but_exact=False."
        )
    return family_spec(
        model,
        {
            "word_embeddings": "embedding_rowwise",
            "h.*.self_attention.query_key_value": "colwise",
            "h.*.self_attention.dense": "rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        },
        local_attributes={"h.*.self_attention": ("num_heads",)},
        local_arguments={"h.*.self_attention": ("alibi",)},
    )


register_facts(
    "bloom",
    facts=TypeFacts(
        variants=[{"apply_residual_connection_post_layernorm": True}],
    ),
)
