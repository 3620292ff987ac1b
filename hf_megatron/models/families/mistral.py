"""Mistral: Large 4 reuses sparse attention indices and the keys and values of earlier layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import SPARSE_INDEXER, TypeFacts, register_facts


@register_model("mistral_large4_text")
def mistral_large4_text(model: Any) -> ModelSpec:
    sources = model.config.kv_source_layers
    return corrected_spec(
        model,
        full_sequence_blocks=("layers.*.self_attn",),
        # Hidden states and the token indices that later layers reuse.
        layer_num_outputs=2,
        mutable_layer_arguments=("shared_kv_states",) if sources != list(range(len(sources))) else (),
    )


register_facts(
    "ministral",
    facts=TypeFacts(
        # The default has no head size, which the attention reads.
        defaults={"head_dim": 128},
    ),
)
register_facts(
    "mistral_large4_text",
    facts=TypeFacts(
        no_gradient=SPARSE_INDEXER,
    ),
)
register_facts(
    "mistral",
    facts=TypeFacts(
        variants=[{"sliding_window": None}, {"num_key_value_heads": 1}],
    ),
)
register_facts(
    "mixtral",
    facts=TypeFacts(
        variants=[{"sliding_window": 4096}],
    ),
)
