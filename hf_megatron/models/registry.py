"""`register_model` and the lookup by `config.model_type`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import PlanError
from .composite import composite_spec
from .infer import stated_or_inferred_spec
from .spec import ModelSpec
from .type_facts import load_families

SpecBuilder = Callable[[Any], ModelSpec]

# Module-level state: this registry, that of the pipeline schedules, and the patch registry.
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
    """Lists the model types with a spec of their own."""
    load_families()
    return sorted(REGISTRY)


def registered_spec(model: nn.Module) -> ModelSpec | None:
    """Returns the spec a family states of a model or its text part; `None` for one whose spec would be derived."""
    load_families()
    builder = REGISTRY.get(str(model.config.model_type))  # type: ignore[union-attr]
    return composite_spec(model, REGISTRY) if builder is None else builder(model)


def spec_for(model: nn.Module) -> ModelSpec:
    """Returns the spec of a model on the meta device: its family's, from transformers' plan, or by structure.

    Raises:
        PlanError: none of them exists.
        UnsupportedError: the family is refused, with the reason.
    """
    return registered_spec(model) or stated_or_inferred_spec(model)
