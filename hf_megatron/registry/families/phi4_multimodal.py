"""Phi-4 multimodal: its language model embeds images and audio itself."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("phi4_multimodal")
def phi4_multimodal(model: Any) -> ModelSpec:
    return corrected_spec(
        model, no_pipeline="the embedding of images and audio reads the tokens' embedding. Load it with pp_size=1."
    )
