"""Registry of model specs by `config.model_type`, with `register_model`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import PlanError
from .composite import composite_spec
from .infer import stated_or_inferred_spec
from .spec import ModelSpec
from .type_facts import load_families

SpecBuilder = Callable[[Any], ModelSpec]

# Module-level state, as are the registries of pipeline schedules and of patches.
REGISTRY: dict[str, SpecBuilder] = {}


def register_model(model_type: str, builder: SpecBuilder | None = None, *, replace: bool = False):
    """Registers the function that builds a model type's `ModelSpec` from the model; usable as a decorator.

    Raises:
        PlanError: the type is registered already and `replace` is not set.
    """

    def register(function: SpecBuilder) -> SpecBuilder:
        if model_type in REGISTRY and not replace:
            raise PlanError(f"model type {model_type!r} is registered already; pass replace=True to override it.")
        REGISTRY[model_type] = function
        return function

    return register if builder is None else register(builder)


def registered_types() -> list[str]:
    """Returns the sorted model types with a registered spec."""
    load_families()
    return sorted(REGISTRY)


def registered_spec(model: nn.Module) -> ModelSpec | None:
    """Returns the registered spec of a model or its language model; `None` if it has to be derived or inferred."""
    load_families()
    builder = REGISTRY.get(str(model.config.model_type))  # type: ignore[union-attr]
    return composite_spec(model, REGISTRY) if builder is None else builder(model)


def spec_for(model: nn.Module) -> ModelSpec:
    """Returns the spec of a model on the meta device: registered, from transformers' plan, or inferred.

    Raises:
        PlanError: none of them exists.
        UnsupportedError: the family does not support this config.
    """
    return registered_spec(model) or stated_or_inferred_spec(model)
