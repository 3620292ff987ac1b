"""Functions that were put in the place of those that a split model was compared with.

Inside of split blocks, and with sequence parallelism in layers, a function is called with this rank's part. What works
on single entries may stand there; another one is refused before the model computes.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import UnsupportedError
from ..parts import is_marked, is_of_checked_library
from ..upstream import activation_classes, attention_function, fetches_attention_core, leave_uncompiled


class ExchangedFunctions:
    """The modules, methods and attention functions of a model as they were when it was laid out.

    A deep copy is compared with what was copied.

    Args:
        modules: by name, of those whose functions see a part of a tensor.
    """

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules
        self.children = {name: dict(module._modules) for name, module in modules.items()}
        self.functions = {name: found for name, module in modules.items() if (found := _functions(module))}
        bases = {base for module in modules.values() for base in type(module).__mro__}
        self.methods = {base: vars(base)["forward"] for base in bases if "forward" in vars(base)}
        attention = [vars(module) for module in modules.values() if fetches_attention_core(type(module))]
        self.configs = list({id(v["config"]): v["config"] for v in attention if "config" in v}.values())

    def install(self, *models: nn.Module) -> None:
        for model in models:
            model.register_forward_pre_hook(self._enter)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple) -> None:
        for base, method in self.methods.items():
            if vars(base)["forward"] is not method and not is_marked(vars(base)["forward"]):
                _refuse(f"{base.__qualname__}.forward")
        for name, module in self.modules.items():
            # Modules are equal where they are the same.
            if module._modules != self.children[name]:
                self._compare_children(name, module)
            if "forward" in module.__dict__ and not _is_own(module.__dict__["forward"], module):
                _refuse(f"{name}.forward")
        for name, functions in self.functions.items():
            for attribute, function in functions.items():
                found = vars(self.modules[name]).get(attribute)
                if found is not function and callable(found) and not is_marked(found):
                    _refuse(f"{name}.{attribute}")
        for implementation in {config._attn_implementation for config in self.configs}:
            function = attention_function(implementation)
            if function is not None and not is_of_checked_library(function) and not is_marked(function):
                _refuse(f"attn_implementation={implementation!r}")

    def _compare_children(self, name: str, module: nn.Module) -> None:
        for child, found in module._modules.items():
            before = self.children[name].get(child)
            if found is not before and before is not None and not _works_on_entries(found, before):
                _refuse(f"{name}.{child} ({type(found).__name__} in the place of {type(before).__name__})")


def _functions(module: nn.Module) -> dict[str, Any]:
    """Lists the functions among a module's own attributes."""
    return {n: value for n, value in vars(module).items() if callable(value) and n != "forward" and n[0] != "_"}


def _works_on_entries(found: nn.Module | None, before: nn.Module) -> bool:
    if found is None or is_marked(found) or is_marked(type(found).forward):
        return True
    if "forward" in vars(found) or next(found.parameters(), None) is not None:
        return False
    return type(found) in {type(before), nn.Dropout, nn.Identity, nn.GELU, *activation_classes()}


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Tells whether a forward that was set on a module is that of its class, perhaps inside torch's checkpoint."""
    while isinstance(forward, partial) and forward.func is checkpoint and forward.args and not is_marked(forward):
        forward = forward.args[0]
    own = getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
    return own or is_marked(forward)


def _refuse(what: str) -> None:
    raise UnsupportedError(
        f"{what} was exchanged after the model was laid out: it is called with this rank's part of a tensor. Mark it "
        "with hf_megatron.works_on_parts if it looks at single entries (attention: heads; layers: tokens), or load the "
        "model with tp_size=1."
    )
