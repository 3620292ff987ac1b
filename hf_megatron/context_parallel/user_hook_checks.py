"""Checks of user functions in a model whose sequences are split.

Inside of layers a function would see local tokens only, and is rejected by name. After the layers it sees full
sequences: the modules there compute on local tokens only if no user function is installed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..compat.shard_safe import is_from_checked_library, is_marked
from ..compat.shared import Shared
from ..compat.torch_autograd import global_forward_hooks, leave_uncompiled
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError
from ..tensor_parallel.user_hooks.replaced_functions import ExchangedFunctions, follow_names


class UserHookChecks(Shared):
    """Checks for forward hooks and replaced functions before each forward of a model.

    Args:
        layers (`str`): name of the list of layers.

    Attributes:
        tail_is_stock: whether the current call has none of these outside of the layers.
    """

    def __init__(self, model: Any, layers: str):
        embeddings = model.get_input_embeddings()
        named = {name: module for name, module in model.named_modules() if module is not embeddings}
        self.inside = {name: module for name, module in named.items() if name.startswith(f"{layers}.")}
        self.around = {name: module for name, module in named.items() if name not in self.inside}
        self.exchanged = ExchangedFunctions(self.around, "cp_size")
        self.exchanged_inside = ExchangedFunctions(self.inside, "cp_size")
        self.tail_is_stock = True
        self.end = 0

    def install(self, model: Any, hooks: ForwardHooks) -> None:
        """Registers the checks ahead of other axes' handling of hooks; called after these have registered their own."""
        models = (model,) if model.base_model is model else (model, model.base_model)
        self.exchanged_inside.install(hooks, *models)
        for one in models:
            hooks.add_to(one, "user hook checks", self._enter)
        # Hook ids increase over all modules: user hooks have later ids than the last of these.
        self.end = RemovableHandle.next_id

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Tracks modules that wrap or replace the parallelized ones, by name."""
        for known, exchanged in ((self.inside, self.exchanged_inside), (self.around, self.exchanged)):
            exchanged.follow({name: module for name, module in modules.items() if name in known})
            follow_names(known, modules)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for hook in global_forward_hooks():
            if not is_marked(hook) and not is_from_checked_library(hook):
                _reject("all modules", hook)
        for name, module in self.inside.items():
            for hook in self._users_hooks(module):
                _reject(f"{name} ({type(module).__name__})", hook)
        # Hooks of the model itself are fine: it returns full sequences.
        hooks = (hook for name, module in self.around.items() if name for hook in self._users_hooks(module))
        # With a user function after the layers, tokens are gathered before it.
        self.tail_is_stock = next(hooks, None) is None and next(self.exchanged.found(), None) is None

    def _users_hooks(self, module: nn.Module) -> Iterator[Any]:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in hooks.items():
                if number >= self.end and not is_marked(hook) and not is_from_checked_library(hook):
                    yield hook


def _reject(where: str, hook: Any) -> None:
    named = getattr(hook, "__qualname__", type(hook).__qualname__)
    raise UnsupportedError(
        f"A forward hook of {where} ({named}): with cp_size > 1 it would receive only this rank's tokens of each "
        "sequence. Hook the model, its base model or its final norm, mark the hook with hf_megatron.shard_safe if a "
        "shard is enough, or use cp_size=1."
    )
