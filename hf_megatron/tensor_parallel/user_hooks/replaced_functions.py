"""Detects functions of a sharded model that were replaced after it was parallelized.

Inside of sharded blocks, and with sequence parallelism in layers, functions are called with this rank's shard.
Elementwise replacements and fused kernels that are right on shards are accepted; any other is rejected before the
model computes.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.loss import loss_utils

from ...compat.fused_kernels import liger_kernel_name
from ...compat.shard_safe import is_from_checked_library, is_marked
from ...compat.torch_autograd import leave_uncompiled
from ...compat.transformers_models import activation_classes, chosen_functions
from ...core.forward_hooks import ForwardHooks
from ...errors import UnsupportedError
from ...models.fused_kernels import has_parallel_forward, is_shard_safe, liger_setting

# Modules with functions that layers and losses of every model call.
_SHARED = (functional.__name__, loss_utils.__name__)


class Replacement(NamedTuple):
    """A replaced module, method or function.

    Attributes:
        name: its name in the model or its file.
        value: the replacement, if it is a function.
    """

    name: str
    value: Any = None


class ExchangedFunctions:
    """Modules, methods and functions of a model as they were when it was parallelized.

    A deep copy is compared with the modules that were copied. Functions in library classes and files that were
    replaced before are reported too.

    Args:
        modules: by name, those whose functions see shards of tensors.
        field (`str`): config field whose size would have to be 1, for the error.
    """

    def __init__(self, modules: dict[str, nn.Module], field: str = "tp_size"):
        self.modules, self.field = dict(modules), field
        self.children = {name: dict(module._modules) for name, module in modules.items()}
        self.forwards = {name: type(module).forward for name, module in modules.items()}
        self.functions = {
            name: module_functions for name, module in modules.items() if (module_functions := _functions(module))
        }
        # Also base classes and module-level functions: a replacement there affects all models.
        bases = {base for module in modules.values() for base in type(module).__mro__} | {nn.Embedding}
        self.methods = {base: vars(base)["forward"] for base in bases if "forward" in vars(base)}
        files = {base.__module__ for base in bases if base.__module__.startswith("transformers.models.")} | {*_SHARED}
        self.files = {name: _filter_functions(vars(sys.modules[name])) for name in files}
        self.exchanged_before = [
            Replacement(f"{file}.{name}", self.files[file][name])
            for file in files
            for name in _replaced_in(file, self.files[file])
        ]
        # Classes that Liger put into the files before the model was built.
        self.exchanged_before += [
            Replacement(name, forward)
            for name, forward in ((name, type(module).forward) for name, module in modules.items())
            if liger_kernel_name(forward) is not None and not is_shard_safe(forward)
        ]
        configs = [vars(module).get("config") for module in modules.values()]
        self.configs = list({id(config): config for config in configs if config is not None}.values())

    def install(self, hooks: ForwardHooks, *models: nn.Module) -> None:
        """Registers the check for calls of `models`; `hooks` is the hook table of one of them."""
        for model in models:
            hooks.add_to(model, "replaced functions", self._enter)

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Tracks modules that wrap or replace the parallelized ones, by name."""
        for name, module in modules.items():
            parent, _, child = name.rpartition(".")
            if child in self.children.get(parent, ()):
                self.children[parent][child] = module

    def found(self) -> Iterator[Replacement]:
        """Yields the replaced modules, methods and functions."""
        yield from self.exchanged_before
        for base, method in self.methods.items():
            present = vars(base)["forward"]
            if _is_exchanged(present, method) or (is_from_checked_library(base) and _is_users(present)):
                yield Replacement(f"{base.__qualname__}.forward", present)
        for file, functions in self.files.items():
            present = vars(sys.modules[file])
            for name, function in functions.items():
                if _is_exchanged(present.get(name), function):
                    yield Replacement(f"{file}.{name}", present.get(name))
        # Most modules are unchanged, which comparisons without Python calls tell. nn.Module compares by identity, so
        # equal dicts hold the same modules.
        for name, module in self.modules.items():
            if (
                type(module).forward is not self.forwards[name]
                or module._modules != self.children[name]
                or "forward" in module.__dict__
            ):
                yield from self._found_in(name, module)
        for name, functions in self.functions.items():
            for attribute, function in functions.items():
                current = vars(self.modules[name]).get(attribute)
                if current is not function and callable(current) and not is_shard_safe(current):
                    yield Replacement(f"{name}.{attribute}", current)
        for config in self.configs:
            for option, function in chosen_functions(config).items():
                if _is_users(function):
                    yield Replacement(option, function)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if (replacement := next(self.found(), None)) is not None:
            self._reject(replacement)

    def _found_in(self, name: str, module: nn.Module) -> Iterator[Replacement]:
        if type(module).forward is not self.forwards[name] and not is_shard_safe(type(module).forward):
            yield Replacement(f"{name}.__class__ ({type(module).__name__})", type(module).forward)
        for child, submodule in module._modules.items() if module._modules != self.children[name] else ():
            before = self.children[name].get(child)
            if submodule is not before and before is not None and not _works_on_entries(submodule, before):
                yield Replacement(f"{name}.{child} ({type(submodule).__name__} instead of {type(before).__name__})")
        if "forward" in module.__dict__ and not _is_own(module.__dict__["forward"], module):
            yield Replacement(f"{name}.forward", module.__dict__["forward"])

    def _reject(self, replacement: Replacement) -> None:
        if (kernel := liger_kernel_name(replacement.value)) is not None:
            setting = liger_setting(replacement.value)
            cure = "Leave it out" if setting is None else f"Pass {setting}=False"
            raise UnsupportedError(
                f"{replacement.name} is Liger's {kernel}, which is not supported with {self.field} > 1: it was not "
                f"compared on a shard of its input, or the module exchanges values with other ranks. {cure} where "
                "Liger is applied (liger_kernel_config of the trainer's arguments, or apply_liger_kernel_to_*)."
            )
        raise UnsupportedError(
            f"{replacement.name} was replaced, but it is called with this rank's shard of a tensor. Mark it with "
            "hf_megatron.shard_safe if it is elementwise (attention: per head; layers: per token), or load the model "
            f"with {self.field}=1."
        )


def follow_names(known: dict[str, nn.Module], modules: Mapping[str, nn.Module]) -> None:
    """Replaces modules, and everything inside of them, in a table of modules by name."""
    for name, module in modules.items():
        if name in known:
            for inner in [inner for inner in known if inner.startswith(f"{name}.")]:
                del known[inner]
            known |= {f"{name}.{part}".rstrip("."): inside for part, inside in module.named_modules()}


def _functions(module: nn.Module) -> dict[str, Any]:
    """Returns the functions among a module's own attributes."""
    return {n: value for n, value in vars(module).items() if callable(value) and n != "forward" and n[0] != "_"}


def _filter_functions(names: dict[str, Any]) -> dict[str, Any]:
    # Also partials and callable objects, which `inspect.isroutine` tells from functions differently by Python version.
    return {name: value for name, value in names.items() if callable(value) and not isinstance(value, type)}


def _is_exchanged(present: Any, before: Any) -> bool:
    return present is not before and not is_shard_safe(present)


def _is_users(function: Any) -> bool:
    return not is_from_checked_library(function) and not is_shard_safe(function)


def _replaced_in(file: str, functions: dict[str, Any]) -> list[str]:
    """Returns the functions that a transformers module defines in its source but that come from elsewhere now."""
    users = [name for name, function in functions.items() if _is_users(function)]
    source = inspect.getsource(sys.modules[file]) if users else ""
    return [name for name in users if f"\ndef {name}(" in source or f"\n{name} = _add_docstr(" in source]


def _works_on_entries(submodule: nn.Module | None, before: nn.Module) -> bool:
    if submodule is None or is_marked(submodule) or is_marked(type(submodule).forward):
        return True
    if "forward" in vars(submodule) or next(submodule.parameters(), None) is not None:
        return False
    return type(submodule) in {type(before), nn.Dropout, nn.Identity, nn.GELU, *activation_classes()}


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Returns whether a forward set on a module may be called with shards.

    It is its class's own, possibly wrapped in torch's checkpoint, or a fused kernel instead of a stock forward.
    """
    while isinstance(forward, partial) and forward.func is checkpoint and forward.args and not is_marked(forward):
        forward = forward.args[0]
    is_class_forward = getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
    if is_class_forward or is_marked(forward):
        return True
    # A class that sums over ranks, or computes in chunks, has to keep its forward.
    return is_shard_safe(forward) and not has_parallel_forward(module)
