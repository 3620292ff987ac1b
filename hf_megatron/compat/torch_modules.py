"""Modules whose calls are compiled without the functions around them (private symbols of `nn.Module`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .graph_leaves import read_local
from .torch_autograd import inherit_forward, leave_uncompiled
from .transformers_models import get_recorder_attributes

# Attribute of local views in the call of a compiled layer.
_IN_COMPILED_CALL = "_hf_megatron_in_compiled_call"

# (module, args, kwargs) -> new (args, kwargs), or `None` to keep them.
Enter = Callable[[Any, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]] | None]
# (module, args, output) -> a new output.
Exit = Callable[[Any, tuple, Any], Any]


class ModuleCompiledLocally:
    """Mixin of a module whose compiled call reads plain local tensors instead of DTensors.

    Views of the parameters are taken outside of the graph: AOTAutograd saves the mesh of a DTensor for the backward,
    where recomputation accepts tensors only. Modules with an attribute `is_off_stage` have nothing to compile.
    """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the call as `nn.Module.compile` does, apart from the functions around it."""
        if getattr(self, "is_off_stage", False):
            return
        compiled = torch.compile(super()._call_impl, *args, **kwargs)  # type: ignore[misc]
        self._compiled_call_impl = partial(_run_compiled, self, compiled)


class SurroundedModule(ModuleCompiledLocally):
    """Mixin of a module whose call, hooks included, runs between functions that `module.compile()` leaves out.

    A pipeline stage wraps `__call__`, so it replaces the inputs of these functions too, as it does those of forward
    hooks. Gradient checkpointing recomputes them where it wraps `__call__` (until transformers 5.22).
    """

    _enter_uncompiled: Enter | None
    _exit_uncompiled: Exit | None

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _enter(self, args, kwargs)
        return _exit(self, args, super()._call_impl(*args, **kwargs))  # type: ignore[misc]


@leave_uncompiled
def _enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    changed = None if module._enter_uncompiled is None else module._enter_uncompiled(module, args, kwargs)
    return (args, kwargs) if changed is None else changed


@leave_uncompiled
def _exit(module: Any, args: tuple, output: Any) -> Any:
    return output if module._exit_uncompiled is None else module._exit_uncompiled(module, args, output)


def _run_compiled(module: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    is_surrounded = isinstance(module, SurroundedModule)
    if is_surrounded:
        args, kwargs = _enter(module, args, kwargs)
    with _plain_parameters(module):
        output = compiled(*args, **kwargs)
    return _exit(module, args, output) if is_surrounded else output


@contextmanager
def _plain_parameters(layer: nn.Module) -> Iterator[None]:
    """Replaces a layer's DTensors by differentiable views of their local tensors, of any shape, inside the context.

    Parameters that FSDP2 manages are left to it: its hooks run inside of the call.
    """
    modules = [module for module in layer.modules() if module._parameters]
    if any(base.__name__ == "FSDPModule" for module in modules for base in type(module).__mro__):
        yield
        return
    replaced = [(module, dict(module._parameters)) for module in modules]
    views: list[Any] = []
    try:
        for module, parameters in replaced:
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    view: Any = read_local(parameter)
                    module._parameters[name] = view
                    setattr(view, _IN_COMPILED_CALL, True)
                    views.append(view)
        yield
    finally:
        for module, parameters in replaced:
            module._parameters.update(parameters)
        for view in views:
            vars(view).pop(_IN_COMPILED_CALL, None)


def is_in_compiled_call(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of any shape replaces a parameter in the present call of a compiled layer."""
    return hasattr(tensor, _IN_COMPILED_CALL)


@cache
def _mixed_class(mixin: Any, base: Any) -> type[nn.Module]:
    mixed: Any = type(base.__name__, (mixin, base), get_recorder_attributes(base))
    inherit_forward(mixed)
    return mixed


def compile_locally(module: nn.Module) -> None:
    """Makes `module.compile()` compile the call on plain local tensors."""
    if not isinstance(module, ModuleCompiledLocally):
        module.__class__ = _mixed_class(ModuleCompiledLocally, type(module))  # type: ignore[arg-type, assignment]


def surround(module: nn.Module, enter: Enter | None, exit: Exit | None) -> None:
    """Runs `enter` before and `exit` after each call of a module; at most once per module.

    Neither is called by the compiled code of the module, and `exit` is not called after an error.
    """
    module._enter_uncompiled, module._exit_uncompiled = enter, exit  # type: ignore[assignment]
    module.__class__ = _mixed_class(SurroundedModule, type(module))  # type: ignore[arg-type, assignment]


def get_surrounding(module: nn.Module) -> tuple[Enter | None, Exit | None]:
    """Returns the functions before and after each call of a module, `None` where there are none."""
    if not isinstance(module, SurroundedModule):
        return None, None
    return module._enter_uncompiled, module._exit_uncompiled


def is_compiled(module: nn.Module) -> bool:
    """Returns whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


@contextmanager
def running_uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs compiled modules of a model eagerly inside the context."""
    compiled = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
