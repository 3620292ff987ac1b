"""X-MOD: adapters of languages, which work on one token at a time, chosen for each row."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model

_ADAPTERS = "encoder.layer.*.output.adapter_modules"


@register_model("xmod")
def xmod(model: Any) -> ModelSpec:
    adapters = tuple(f"{_ADAPTERS}.{language}" for language in model.config.languages)
    return corrected_spec(model, transparent=(_ADAPTERS, *adapters), no_sequence_parallel=None)
