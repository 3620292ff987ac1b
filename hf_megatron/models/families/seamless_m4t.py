"""Seamless M4T: an adapter with layers of its own shortens the output of the speech encoder layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_ADAPTER, _FEATURES = "speech_encoder.adapter", "speech_encoder.feature_projection"
_STACKS = ("speech_encoder.encoder.layers", "text_decoder.layers")


@register_model("seamless_m4t")
@register_model("seamless_m4t_v2")
def seamless_m4t(model: Any) -> ModelSpec:
    parts = {name for name, _ in model.named_modules()}
    if _ADAPTER not in parts:
        return corrected_spec(model)
    return corrected_spec(model, after_encoder=(_ADAPTER,), run_on_all_stages=(_FEATURES,), layer_stacks=_STACKS)


register_facts(
    "seamless_m4t",
    "seamless_m4t_v2",
    facts=TypeFacts(
        tiny={"max_source_positions": 16},
    ),
)
