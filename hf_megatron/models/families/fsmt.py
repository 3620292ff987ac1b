"""FSMT: rows are in the second dim of its layers, the one that is split; a table of tokens passes for a head."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("fsmt")
def fsmt(model: Any) -> ModelSpec:
    return corrected_spec(model, before_layers=("decoder.embed_tokens",))
