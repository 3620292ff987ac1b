"""Calls of a sharded model's modules from user forward hooks, which hold full tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...compat.shared import Shared
from ...compat.torch_autograd import around_all_modules
from ...errors import UnsupportedError
from ..local_parameters import ActiveForwards
from .module_layouts import Activations
from .tensor_layouts import WHOLE


class CallsInHooks(Shared):
    """Allows hooks to call modules that take and return full tensors, and rejects calls of others by name.

    Args:
        names: the model's modules that are sharded or belong to a layer, by id.
    """

    def __init__(self, activations: Activations, names: dict[int, str], forwards: ActiveForwards):
        self.activations, self.names, self.forwards = activations, names, forwards

    @contextmanager
    def guarded(self, hook: str) -> Iterator[None]:
        """Raises `UnsupportedError` inside the context for calls and reads that `hook`, a description, cannot do."""
        if torch.compiler.is_compiling():
            yield
            return
        # Only the outermost call of a hook is checked: inside of it modules see the shards they expect.
        before, self.forwards.in_hook = self.forwards.in_hook, hook
        inner: list[nn.Module] = []

        def enter(module: nn.Module, args: tuple) -> None:
            if not inner:
                self._require_full(hook, module)
                self.forwards.in_hook = None
            inner.append(module)

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if inner and inner.pop() is not None and not inner:
                self.forwards.in_hook = hook

        try:
            with around_all_modules(enter, leave):
                yield
        finally:
            self.forwards.in_hook = before

    def _require_full(self, hook: str, module: nn.Module) -> None:
        name = self.names.get(id(module))
        forms = None if name is None else self.activations.of(name, module)
        if forms is not None and not (forms.given is WHOLE and forms.returned is WHOLE):
            raise UnsupportedError(
                f"{hook} calls {name} ({type(module).__name__}), whose input or output is sharded across ranks; hooks "
                "receive full tensors. Call a complete block with sequence_parallel=False, or load the model with "
                "tp_size=1."
            )
