"""BLT: bytes are cut into patches between stacks of layers, and patches and bytes read each other there."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("blt")
def blt(model: Any) -> ModelSpec:
    # Those of bytes stay whole: between their layers patches read them.
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
        # As wide as the bytes that a patch is made of are together.
        tiny={"hidden_size_global": 128},
    ),
)
register_facts(
    "blt_global_transformer",
    facts=TypeFacts(
        tiny={"hidden_size": 128, "head_dim": 32},
    ),
)
