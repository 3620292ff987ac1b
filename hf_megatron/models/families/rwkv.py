"""RWKV: states are independent per channel, and MLPs have a gate over all channels."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts

_ROWS = 0, ()
_COLUMNS = 1, ()
CHANNELS = HeadBlock(
    ("attention_hidden_size",),
    dict.fromkeys(("time_decay", "time_first", *(f"{name}.weight" for name in ("key", "value", "receptance"))), _ROWS)
    | {"output.weight": _COLUMNS},
)
MLP = HeadBlock((), {"key.weight": _ROWS, "value.weight": _COLUMNS})


@register_model("rwkv")
def rwkv(model: Any) -> ModelSpec:
    prefix = base_prefix(model)
    return family_spec(
        model,
        {"embeddings": "embedding_rowwise"},
        head_sharded_blocks={f"{prefix}blocks.*.attention": CHANNELS, f"{prefix}blocks.*.feed_forward": MLP},
        # Both mix each token with its predecessor.
        full_sequence_blocks=("blocks.*.attention", "blocks.*.feed_forward"),
        no_cache="its recurrent states have all channels, but a rank has only its local channels.",
        # Hidden states, recurrent states and attention weights.
        layer_num_outputs=3,
    )


register_facts(
    "rwkv",
    facts=TypeFacts(
        # Differs from the hidden size.
        tiny={"attention_hidden_size": 48},
    ),
)
