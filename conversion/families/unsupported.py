"""Model types close to one of Megatron-Core's models, and the difference that makes them unsupported."""

from collections.abc import Mapping
from types import MappingProxyType

_MIXER = "MambaMixer of Megatron-Core is that of Mamba2 (mamba2), whose weights are others"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        # models/bert/bert_model.py of 0.16.1. A config can ask for apply_residual_connection_post_layernorm, but no
        # layer reads it.
        "bert": "BertModel of Megatron-Core has its norms before attention and MLP, BERT behind them; the type with "
        "Megatron's is megatron-bert (MegatronBertForPreTraining)",
        # models/common/embeddings/relative_pos_embedding.py: one table for all layers.
        "umt5": "T5Model of Megatron-Core has one bias of relative positions for all layers, UMT5 one in each; t5 and "
        "mt5 have one",
        "mamba": _MIXER,
        "falcon_mamba": _MIXER,
    }
)
