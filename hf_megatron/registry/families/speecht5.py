"""SpeechT5: all heads of its encoder read one table of distances, whose vectors are as wide as a head."""

from dataclasses import replace
from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model

_ENCODER = "encoder.wrapped_encoder"
_DISTANCES = f"{_ENCODER}.embed_positions"


@register_model("speecht5")
def speecht5(model: Any) -> ModelSpec:
    spec = corrected_spec(
        model,
        # Each rank's heads give it a part of its gradient.
        {f"{_DISTANCES}.pe_k": "replicated_sum"},
        no_pipeline="encoder.prenet makes the mask that its encoder's layers on all stages read, from clips that only "
        "the first stage reads. Load it with pp_size=1.",
    )
    # No tables with an entry for each head are among the arguments of its blocks.
    return replace(spec, local_arguments={})
