"""Models of any encoder and any decoder: each of the two has the spec of its own type."""

from typing import Any

from ..composite import spec_of_parts
from ..infer import stated_or_inferred_spec
from ..registry import REGISTRY, register_model
from ..spec import ModelSpec

_PARTS = ("encoder", "decoder")


@register_model("encoder-decoder")
def encoder_decoder(model: Any) -> ModelSpec:
    parts = {name: model.get_submodule(name) for name in _PARTS}
    builders = {name: REGISTRY.get(part.config.model_type, stated_or_inferred_spec) for name, part in parts.items()}
    return spec_of_parts(model, {name: builders[name](part) for name, part in parts.items()})
