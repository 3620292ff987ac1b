"""Modules that a loop exchanges in a pipelined model, which stand in the pipeline as the ones before them.

model.lm_head = nn.Linear(...)      the last stage computes with it, the others know its shape
"""

from functools import cache
from typing import Any

from torch import nn

from .absent_weights import Placeholder
from .boundary import StagedInput, StagedLayer, output_width


@cache
def _staged_class(mixin: Any, base: Any) -> type[nn.Module]:
    return type(base.__name__, (mixin, base), {})


def stand_around(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Puts a mixin in front of a module's class; what it keeps stays out of the module's own names."""
    module.__class__ = _staged_class(mixin, type(module))  # type: ignore[arg-type]
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def _take_place(owner: nn.Module, name: str, module: nn.Module | None) -> nn.Module | None:
    """Has a module that a loop exchanges stand in the pipeline as the one before it; returns what to register."""
    before = owner._modules.get(name)
    if module is None or not isinstance(before, (Placeholder, StagedLayer, StagedInput)):
        return None
    # What wraps the one before goes through it.
    if isinstance(module, Placeholder) or any(part is before for part in module.modules()):
        return None
    if isinstance(before, Placeholder):
        return before.standing_for(module)
    if isinstance(before, StagedLayer):
        if not isinstance(module, StagedLayer):
            kept = {"_stage_boundary": before._stage_boundary, "_layer_index": before._layer_index}
            stand_around(module, StagedLayer, **kept)
    elif not isinstance(module, StagedInput):
        kept = {"_stage_boundary": before._stage_boundary, "_name": before._name, "_width": output_width(module)}
        stand_around(module, StagedInput, **kept)
    return None


def follow_exchanged_modules() -> Any:
    """Registers what keeps exchanged modules on their stages; returns the handle to remove it."""
    # Torch registers what a hook returns, which its annotation leaves out.
    register: Any = nn.modules.module.register_module_module_registration_hook
    return register(_take_place)
