"""FSMT: its layers have tokens in the first dim and rows in the second."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("fsmt")
def fsmt(model: Any) -> ModelSpec:
    return corrected_spec(model, no_sequence_parallel="its layers have tokens in the first dim and rows in the second.")
