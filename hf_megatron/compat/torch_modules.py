"""Functions around a module's call that are never compiled (private symbols of `nn.Module`)."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from .torch_autograd import leave_uncompiled
from .transformers_models import get_recorder_attributes

# (module, args, kwargs) -> new (args, kwargs), or `None` to keep them.
Enter = Callable[[Any, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]] | None]
# (module, args, output) -> a new output.
Exit = Callable[[Any, tuple, Any], Any]


class SurroundedModule:
    """Mixin of a module whose call, hooks included, runs between functions that `module.compile()` leaves out.

    Gradient checkpointing and a pipeline stage wrap `__call__`, so they recompute or replace the inputs of these
    functions too, as they do those of forward hooks.
    """

    _enter_uncompiled: Enter | None
    _exit_uncompiled: Exit | None

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return _surround(self, super()._call_impl, *args, **kwargs)  # type: ignore[misc]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the call as `nn.Module.compile` does, without the functions around it."""
        compiled = torch.compile(super()._call_impl, *args, **kwargs)  # type: ignore[misc]
        self._compiled_call_impl = partial(_surround, self, compiled)


@leave_uncompiled
def _enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    changed = None if module._enter_uncompiled is None else module._enter_uncompiled(module, args, kwargs)
    return (args, kwargs) if changed is None else changed


@leave_uncompiled
def _exit(module: Any, args: tuple, output: Any) -> Any:
    return output if module._exit_uncompiled is None else module._exit_uncompiled(module, args, output)


def _surround(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _enter(module, args, kwargs)
    return _exit(module, args, call(*args, **kwargs))


@cache
def _surrounded_class(base: Any) -> type[nn.Module]:
    return type(base.__name__, (SurroundedModule, base), get_recorder_attributes(base))


def get_surrounding(module: nn.Module) -> tuple[Enter | None, Exit | None]:
    """Returns the functions before and after each call of a module, `None` where there are none."""
    if not isinstance(module, SurroundedModule):
        return None, None
    return module._enter_uncompiled, module._exit_uncompiled


def surround(module: nn.Module, enter: Enter | None, exit: Exit | None) -> None:
    """Runs `enter` before and `exit` after each call of a module; at most once per module.

    Neither is called by the compiled code of the module, and `exit` is not called after an error.
    """
    module._enter_uncompiled, module._exit_uncompiled = enter, exit  # type: ignore[assignment]
    module.__class__ = _surrounded_class(type(module))  # type: ignore[assignment]
