"""X-MOD: per-language adapters, pointwise over tokens and selected per sample."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_ADAPTERS = "encoder.layer.*.output.adapter_modules"


@register_model("xmod")
def xmod(model: Any) -> ModelSpec:
    adapters = tuple(f"{_ADAPTERS}.{language}" for language in model.config.languages)
    return corrected_spec(model, pointwise_containers=(_ADAPTERS, *adapters), no_sequence_parallel=None)


register_facts(
    "xmod",
    facts=TypeFacts(
        # The default has no language, which selects the adapters.
        defaults={"default_language": "en_XX"},
    ),
)
