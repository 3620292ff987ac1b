"""Encoder-decoder composites: encoder and decoder each use the spec of their own type."""

from typing import Any

from ..composite import merge_specs
from ..infer import stated_or_inferred_spec
from ..registry import REGISTRY, register_model
from ..spec import ModelSpec
from ..type_facts import TypeFacts, register_facts

_PARTS = ("encoder", "decoder")


@register_model("encoder-decoder")
def encoder_decoder(model: Any) -> ModelSpec:
    parts = {name: model.get_submodule(name) for name in _PARTS}
    builders = {name: REGISTRY.get(part.config.model_type, stated_or_inferred_spec) for name, part in parts.items()}
    return merge_specs(model, {name: builders[name](part) for name, part in parts.items()})


register_facts(
    "encoder-decoder",
    facts=TypeFacts(
        # Every checkpoint sets it; the label shift needs it.
        defaults={"decoder_start_token_id": 0, "pad_token_id": 0},
        no_gradient={r"^encoder\.pooler\.": "makes one state of an encoder's, whose states are all read"},
    ),
)
