"""DeBERTa: every layer reads vectors of distances, made once of a table and a norm beside the layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("deberta")
@register_model("deberta-v2")
def deberta(model: Any) -> ModelSpec:
    names = {name.removeprefix(base_prefix(model)) for name, _ in model.named_modules()}
    around = tuple(name for name in ("encoder.rel_embeddings", "encoder.LayerNorm") if name in names)
    return corrected_spec(model, before_layers=around, pre_layer_arguments=("rel_embeddings",) if around else ())
