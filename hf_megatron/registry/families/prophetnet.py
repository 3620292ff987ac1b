"""ProphetNet: its decoder computes streams of several future tokens beside each other."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("prophetnet")
def prophetnet(model: Any) -> ModelSpec:
    return corrected_spec(
        model, no_pipeline="the embeddings of its positions return these as well. Load it with pp_size=1."
    )
