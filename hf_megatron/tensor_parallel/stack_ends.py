"""Check of a layer stack whose sequence is split before its first layer and gathered after its last one."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ..compat.shared import Shared
from ..compat.torch_modules import get_surrounding
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError

Hook = Callable[..., Any]


class SplitStack(Protocol):
    """Stack of layers whose sequence is split.

    Attributes:
        is_inside: whether a forward is between a layer that splits the sequence and one that gathers it.
    """

    is_inside: bool


class StackEnds(Shared):
    """Hooks around the module that runs a stack of layers; its list of layers is scanned only after a change.

    Args:
        stack (`SplitStack`): the stack.
        name (`str`): of the list of layers in the model.
        splits, gathers (`Callable`): the forward pre-hook that splits the sequence, and the forward hook that gathers
            it; the first and the last layer have them.
        setting, off (`str`): the settings that split the sequence and that do not, for the messages.
        is_on_every_layer (`bool`, defaults to `False`): whether every layer has a forward pre-hook of the stack.
    """

    def __init__(
        self,
        stack: SplitStack,
        name: str,
        *,
        splits: Hook,
        gathers: Hook,
        setting: str,
        off: str,
        is_on_every_layer: bool = False,
    ):
        self.stack, self.name, self.splits, self.gathers = stack, name, splits, gathers
        self.setting, self.off, self.is_on_every_layer = setting, off, is_on_every_layer
        self._checked: list[nn.Module] = []

    def install(self, around: nn.Module, model: Any, hooks: ForwardHooks) -> None:
        """Registers the checks on the module of `model` whose forward runs the layers."""
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is around)
        enter = functools.partial(self._enter, self.name.removeprefix(prefix))
        hooks.add_to(around, "sequence ends", enter, self._exit)

    def _enter(self, name: str, around: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # A forward that raised may have left the stack open.
        self.stack.is_inside = False
        layers: Any = around.get_submodule(name)
        # Modules are compared by identity.
        if self._checked == (current := list(layers)):
            return
        before, after = zip(*map(_list_hooks, current), strict=True) if current else ((), ())
        splits = [self.splits in hooks for hooks in before]
        gathers = [self.gathers in hooks for hooks in after]
        is_added = [all(getattr(hook, "__self__", None) is not self.stack for hook in hooks) for hooks in before]
        # A layer splits if it is the first one, or if the layer before it gathers.
        if [True, *gathers] != [*splits, True] or (self.is_on_every_layer and any(is_added)):
            raise UnsupportedError(
                f"The first or last layer of {self.name} was removed, moved or replaced, or a layer was added; with "
                f"{self.setting} they split and gather the sequence. Save the changed model in a single process and "
                f"load it, or set {self.off}."
            )
        self._checked = current

    def _exit(self, around: nn.Module, args: tuple, output: Any) -> None:
        if self.stack.is_inside:
            self.stack.is_inside = False
            raise UnsupportedError(
                f"The last layer of {self.name} was not called (was config.num_hidden_layers changed?); with "
                f"{self.setting} it gathers the sequence. Save the changed model in a single process and load it, or "
                f"set {self.off}."
            )


def _list_hooks(layer: nn.Module) -> tuple[list[Hook], list[Hook]]:
    """Returns the functions before and after the forward of a layer, also of one inside a wrapper."""
    modules = list(layer.modules())
    surrounding = [get_surrounding(module) for module in modules]
    before = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    after = [hook for module in modules for hook in module._forward_hooks.values()]
    before += [enter for enter, _ in surrounding if enter is not None]
    after += [leave for _, leave in surrounding if leave is not None]
    # Methods with bound arguments are compared without these.
    return [getattr(hook, "func", hook) for hook in before], [getattr(hook, "func", hook) for hook in after]
