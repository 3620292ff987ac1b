"""Modality encoders (vision, audio) are not split by context parallelism: their attention sees full sequences."""

import weakref
from typing import Any

from torch import nn

from ..compat.shared import Shared
from ..compat.transformers_models import fetches_attention_core
from ..core.runtime import RUNTIME
from ..models.spec import module_name


class ModalityEncoders(Shared):
    """Hides the current sequence split while a modality encoder computes."""

    def __init__(self) -> None:
        self._before: list[Any] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._modules

    def install(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Registers hooks around each encoder."""
        for encoder in _find_encoders(model, layers):
            self._modules.update(encoder.modules())
            encoder.register_forward_pre_hook(self._enter)
            encoder.register_forward_hook(self._leave, prepend=True, always_call=True)

    def _enter(self, encoder: nn.Module, args: tuple) -> None:
        # Without a context, attention and mask functions are stock.
        self._before.append(RUNTIME.context)
        RUNTIME.context = None

    def _leave(self, encoder: nn.Module, args: tuple, output: Any) -> None:
        # An earlier hook may have raised before `_enter` ran.
        if self._before:
            RUNTIME.context = self._before.pop()


def _find_encoders(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Returns the modules with attention that are siblings of the layers or of modules around the layers."""
    path = module_name(model, layers).split(".")
    chain = [".".join(path[:depth]) for depth in range(len(path) + 1)]
    return [
        child
        for outer in chain[:-1]
        for inner, child in model.get_submodule(outer).named_children()
        if f"{outer}.{inner}".lstrip(".") not in chain
        and any(fetches_attention_core(type(part)) for part in child.modules())
    ]
