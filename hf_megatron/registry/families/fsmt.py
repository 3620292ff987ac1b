"""FSMT: rows are in the second dim of its layers, the one that is split; a table of tokens passes for a head."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("fsmt")
def fsmt(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.embed_tokens",))
