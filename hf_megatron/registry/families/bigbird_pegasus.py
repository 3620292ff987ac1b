"""BigBird-Pegasus: the norm behind its layers has the name of BART's before them."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("bigbird_pegasus")
def bigbird_pegasus(model: Any) -> ModelSpec:
    return corrected_spec(model, after_layers=("decoder.layernorm_embedding",))
