"""Models of any encoder and any decoder: each of the two has the spec of its own type."""

from typing import Any

from ...spec import ModelSpec
from ..infer import stated_or_inferred_spec
from ..lookup import REGISTRY, register_model
from ..text_part import spec_of_parts

_PARTS = ("encoder", "decoder")


@register_model("encoder-decoder")
def encoder_decoder(model: Any) -> ModelSpec:
    parts = {name: model.get_submodule(name) for name in _PARTS}
    builders = {name: REGISTRY.get(part.config.model_type, stated_or_inferred_spec) for name, part in parts.items()}
    return spec_of_parts(model, {name: builders[name](part) for name, part in parts.items()})
