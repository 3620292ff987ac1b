"""BLT: bytes are grouped into patches between layer stacks, with cross-attention between patches and bytes."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("blt")
def blt(model: Any) -> ModelSpec:
    # Only the global stack is sequence-sharded: patches attend to the bytes between the layers of the local stacks.
    return corrected_spec(model, layer_stacks=(f"{base_prefix(model)}global_transformer.layers",))


register_facts(
    "blt",
    facts=TypeFacts(
        tiny={"encoder_hash_byte_group_vocab": 53},
        no_gradient={r"\.patcher\.": "cuts bytes into patches: no gradient comes through a choice"},
    ),
)
register_facts(
    "blt_local_encoder",
    "blt_local_decoder",
    facts=TypeFacts(
        # Width of a patch: the concatenated widths of its bytes.
        tiny={"hidden_size_global": 128},
    ),
)
register_facts(
    "blt_global_transformer",
    facts=TypeFacts(
        tiny={"hidden_size": 128, "head_dim": 32},
    ),
)
