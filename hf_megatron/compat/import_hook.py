"""Import hook that calls back when a watched module has been imported.

`wrapt`'s import hooks cannot be removed, and may run before the module's names are defined.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol


class ImportListener(Protocol):
    """Receiver of finished imports."""

    enabled: bool

    def watches(self, module_name: str) -> bool:
        """Returns whether the listener watches imports of this module."""

    def apply_to(self, module_name: str) -> None:
        """Called once after the module has been executed."""


def is_initializing(module: ModuleType) -> bool:
    """Returns whether a module's own code is still running."""
    return bool(module.__spec__ is not None and getattr(module.__spec__, "_initializing", False))


class _WatchedSpec(importlib.machinery.ModuleSpec):
    """Spec of a module that is being imported; calls back when the import system marks it as done."""

    _hf_megatron_listener: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            listener, self._hf_megatron_listener = self._hf_megatron_listener, None
            if listener is not None and listener.enabled and self.name in sys.modules:
                listener.apply_to(self.name)


def call_when_initialized(module: ModuleType, listener: ImportListener) -> None:
    """Calls `listener.apply_to` after the execution of a module whose import is in progress.

    Needed if an upstream script imports torch, whose backend entry point imports this library.
    """
    spec = module.__spec__
    assert spec is not None
    spec.__class__ = _WatchedSpec
    vars(spec)["_hf_megatron_listener"] = listener


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, listener: ImportListener):
        self.loader, self.listener = loader, listener

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.listener.apply_to(module.__name__)


class ImportFinder(importlib.abc.MetaPathFinder):
    """Meta path finder that finds nothing itself: it wraps the loader of each watched module.

    Args:
        listener: called after each watched module's execution.
    """

    def __init__(self, listener: ImportListener):
        self.listener = listener

    def install(self) -> None:
        """Inserts the finder before all others."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Removes the finder."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        """Returns the spec of the first other finder, with its loader wrapped."""
        if not self.listener.watches(fullname):
            return None
        for finder in sys.meta_path:
            if isinstance(finder, ImportFinder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.listener)  # type: ignore[arg-type]
            if spec is not None:
                return spec
        return None
