"""Model types close to one of Megatron-Core's models, and the difference that makes them unsupported."""

from collections.abc import Mapping
from types import MappingProxyType

_MIXER = "Megatron-Core's MambaMixer is Mamba2's (mamba2), which has different weights"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        # models/bert/bert_model.py of 0.16.1. A config can ask for apply_residual_connection_post_layernorm, but no
        # layer reads it.
        "bert": "Megatron-Core's BertModel has its norms before attention and MLP, BERT after them; the matching type "
        "is megatron-bert (MegatronBertForPreTraining)",
        # models/common/embeddings/relative_pos_embedding.py: one table for all layers.
        "umt5": "Megatron-Core's T5Model has one relative position bias for all layers, as t5 and mt5, UMT5 one per "
        "layer",
        "mamba": _MIXER,
        "falcon_mamba": _MIXER,
    }
)
