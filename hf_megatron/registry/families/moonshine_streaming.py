"""Moonshine Streaming: masks of its encoder's layers come of the convolutions before them."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("moonshine_streaming")
def moonshine_streaming(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        no_pipeline="encoder.embedder makes the mask that layers on all stages read, from clips that only the first "
        "stage reads. Load it with pp_size=1.",
    )
