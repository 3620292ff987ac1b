"""ProphetNet: its decoder computes streams of several future tokens beside each other."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("prophetnet")
def prophetnet(model: Any) -> ModelSpec:
    names = [name for name, _ in model.named_modules() if name.endswith("position_embeddings")]
    # They tell which positions they have embedded, and are asked for others.
    return corrected_spec(model, on_all_stages=tuple(names))
