"""FSMT: its layers have tokens in the first dim and rows in the second, which sequence parallelism splits in their place.

Its decoder's table of tokens passes for its head.
"""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("fsmt")
def fsmt(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.embed_tokens",))
