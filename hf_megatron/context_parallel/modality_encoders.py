"""What has attention beside the layers whose rows are shared out, such as towers: it has rows of its own, whole."""

import weakref
from typing import Any

from torch import nn

from ..compat.shared import Shared
from ..compat.transformers_models import fetches_attention_core
from ..core.runtime import RUNTIME
from ..models.spec import module_name


class ModalityEncoders(Shared):
    """Puts the shared row away while what stands beside a list of layers computes."""

    def __init__(self) -> None:
        self._before: list[Any] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._modules

    def install(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Puts hooks around each tower."""
        for encoder in _sibling(model, layers):
            self._modules.update(encoder.modules())
            encoder.register_forward_pre_hook(self._enter)
            encoder.register_forward_hook(self._leave, prepend=True, always_call=True)

    def _enter(self, encoder: nn.Module, args: tuple) -> None:
        self._before.append(RUNTIME.context)
        RUNTIME.context = None

    def _leave(self, encoder: nn.Module, args: tuple, output: Any) -> None:
        # A hook before this one's may have raised.
        if self._before:
            RUNTIME.context = self._before.pop()


def _sibling(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Lists the children with attention of the modules around a list of layers."""
    path = module_name(model, layers).split(".")
    chain = [".".join(path[:depth]) for depth in range(len(path) + 1)]
    return [
        child
        for outer in chain[:-1]
        for inner, child in model.get_submodule(outer).named_children()
        if f"{outer}.{inner}".lstrip(".") not in chain
        and any(fetches_attention_core(type(part)) for part in child.modules())
    ]
