"""Patch registry: every upstream function and object this library replaces, and how to restore it.

    patches     replaced upstream functions
    patterns    functions of one name in every module whose name matches a pattern; each found one becomes a patch
    hooks       callbacks registered with an upstream module for the whole process
    instances   attributes replaced on single objects of parallelized models (`instance_patches.py`)

A patch is applied at once if its module is imported, otherwise when it is imported, so that `import hf_megatron`
neither imports optional packages nor has to come first.
"""

import fnmatch
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol

from ..errors import MegatronError


@dataclass
class Patch:
    """One replaced function.

    Attributes:
        target: `module:attribute.path`; the last attribute of a function is a variable of its closure, by which a
            function is replaced under every name that it was imported by before.
        replacement: `module:function`, a function that takes the original (of a class method the function in it) before
            the original's own arguments. It is a name, so that declaring a patch imports nothing.
        stock: what the original does, and why that is not enough for a laid out model.
        until: when the replacement is no longer needed.
    """

    target: str
    replacement: str
    stock: str
    until: str
    original: Any = None
    applied: bool = False

    @property
    def is_private(self) -> bool:
        """Whether upstream promises nothing about the target."""
        names = re.split(r"[.:]", self.target)
        return any(name.startswith("_") and not name.endswith("__") for name in names)

    @property
    def module_name(self) -> str:
        return self.target.partition(":")[0]

    def _owner(self) -> tuple[Any, str]:
        owner: Any = sys.modules[self.module_name]
        *path, attribute = self.target.partition(":")[2].split(".")
        for name in path:
            owner = getattr(owner, name)
        return owner, attribute

    def apply(self) -> None:
        if self.applied:
            return
        owner, attribute = self._owner()
        attributes = _attributes(owner)
        if attribute not in attributes:
            self._require_other_version()
            return
        # `vars` keeps staticmethod and classmethod objects as they are; `getattr` would bind them.
        self.original = attributes[attribute]
        module_name, _, function = self.replacement.partition(":")
        _set(owner, attribute, _replaced(self.original, getattr(importlib.import_module(module_name), function)))
        self.applied = True

    def _require_other_version(self) -> None:
        # Not at the top: torch's own targets are patched while torch is imported.
        from .versions import is_of_other_versions

        if not is_of_other_versions(self.target):
            raise MegatronError(
                f"{self.target} does not exist in the installed {self.module_name.partition('.')[0]}: this version is "
                "outside the range hf_megatron supports (see docs/versions.md)."
            )

    def restore(self) -> None:
        if self.applied:
            owner, attribute = self._owner()
            _set(owner, attribute, self.original)
            self.applied = False


@dataclass(frozen=True)
class ModulePatternPatch:
    """A function of one name and form, replaced in every module that defines it.

    A module is searched when it is imported. It has to define the function itself; a function of the name with other
    parameters is left as it is.

    Attributes:
        pattern: the names of modules; `*` stands for any text without a dot.
        attribute: the name of the function.
        parameters: the names of its parameters, all of them and in order.
        replacement, stock, until: as those of a `Patch`.
        excluded: modules whose function is left as it is.
    """

    pattern: str
    attribute: str
    parameters: tuple[str, ...]
    replacement: str
    stock: str
    until: str
    excluded: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{self.pattern}:{self.attribute}"

    def matches(self, module_name: str) -> bool:
        """Returns whether a module of this name is searched for the function."""
        if module_name in self.excluded:
            return False
        names, patterns = module_name.split("."), self.pattern.split(".")
        return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))

    def patch_of(self, module: ModuleType) -> Patch | None:
        """Makes the patch of a module's function; `None` if the module defines no such function."""
        # Of a package whose names are imported on demand, `getattr` would import one.
        function = vars(module).get(self.attribute)
        if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
            return None
        if tuple(inspect.signature(function).parameters) != self.parameters:
            return None
        return Patch(f"{module.__name__}:{self.attribute}", self.replacement, self.stock, self.until)


def _cells(owner: FunctionType) -> dict[str, CellType]:
    return dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Returns what may be replaced on an object: its attributes, or the variables of a function's closure."""
    if isinstance(owner, FunctionType):
        return {name: cell.cell_contents for name, cell in _cells(owner).items()}
    return vars(owner)


def _set(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, FunctionType):
        _cells(owner)[attribute].cell_contents = value
    else:
        setattr(owner, attribute, value)


def _replaced(original: Any, function: Callable) -> Any:
    """Wraps a function, static method or class method as the same kind of thing."""
    if isinstance(original, (classmethod, staticmethod)):
        return type(original)(_replaced(original.__func__, function))
    if isinstance(original, property):
        return property(_replaced(original.fget, function))

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


@dataclass
class Hook:
    """Something registered with an upstream module; `make` is `module:function` and returns a handle to remove it."""

    module_name: str
    make: str
    handle: Any = None

    def apply(self) -> None:
        if self.handle is None:
            module_name, _, function = self.make.partition(":")
            self.handle = getattr(importlib.import_module(module_name), function)()

    def restore(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class Instance(Protocol):
    """What is replaced on the objects of one laid out model."""

    def apply(self) -> None:
        """Puts the replacements in place; twice is once."""

    def restore(self) -> None:
        """Puts back what was there."""


@dataclass
class PatchRegistry:
    """Patches, hooks and patched instances of the process, in the order they were declared."""

    patches: dict[str, Patch] = field(default_factory=dict)
    patterns: dict[str, ModulePatternPatch] = field(default_factory=dict)
    hooks: dict[str, Hook] = field(default_factory=dict)
    instances: "weakref.WeakSet[Instance]" = field(default_factory=weakref.WeakSet)
    enabled: bool = False

    def declare(self, patch: Patch) -> None:
        """Declares a patch; a target has one patch, a second declaration raises `MegatronError`."""
        if patch.target in self.patches:
            raise MegatronError(f"{patch.target} is patched twice.")
        self.patches[patch.target] = patch

    def declare_pattern(self, pattern: ModulePatternPatch) -> None:
        """Declares a patch of every module that matches; twice is once."""
        self.patterns.setdefault(pattern.target, pattern)

    def declare_hook(self, module_name: str, make: str) -> None:
        """Declares a hook of an upstream module; twice is once."""
        self.hooks.setdefault(make, Hook(module_name, make))

    def _entries(self) -> list[Patch | Hook]:
        return [*self.patches.values(), *self.hooks.values()]

    def watches(self, module_name: str) -> bool:
        """Returns whether something is applied when a module of this name is imported."""
        return any(entry.module_name == module_name for entry in self._entries()) or any(
            pattern.matches(module_name) for pattern in self.patterns.values()
        )

    def _declare_matches(self, module_name: str) -> None:
        """Declares the patches of a module that patterns find in it, unless they are declared already."""
        for pattern in self.patterns.values():
            if pattern.matches(module_name) and f"{module_name}:{pattern.attribute}" not in self.patches:
                patch = pattern.patch_of(sys.modules[module_name])
                if patch is not None:
                    self.declare(patch)

    def enable(self) -> None:
        """Applies every patch whose module is imported and waits for the others; twice is once."""
        if self.enabled:
            return
        self.enabled = True
        sys.meta_path.insert(0, _Finder(self))
        for name, imported in list(sys.modules.items()):
            if any(pattern.matches(name) for pattern in self.patterns.values()):
                if _is_initializing(imported):
                    _apply_when_imported(imported, self)
                else:
                    self._declare_matches(name)
        for entry in self._entries():
            module = sys.modules.get(entry.module_name)
            if module is None:
                continue
            if _is_initializing(module):
                # As where one of TRL's own scripts imports torch, which imports this library.
                _apply_when_imported(module, self)
            else:
                entry.apply()
        for instance in self.instances:
            instance.apply()

    def disable(self) -> None:
        """Restores the identical original function objects, and removes what was registered."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        for instance in self.instances:
            instance.restore()
        for entry in reversed(self._entries()):
            entry.restore()
        self.enabled = False

    def apply_to(self, module_name: str) -> None:
        self._declare_matches(module_name)
        for entry in self._entries():
            if entry.module_name == module_name:
                entry.apply()


def _is_initializing(module: ModuleType) -> bool:
    return bool(module.__spec__ is not None and getattr(module.__spec__, "_initializing", False))


class _WatchedSpec(importlib.machinery.ModuleSpec):
    """The spec of a module under way to being imported, whose patches follow when import says that it is done."""

    _hf_megatron_registry: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            registry, self._hf_megatron_registry = self._hf_megatron_registry, None
            if registry is not None and registry.enabled and self.name in sys.modules:
                registry.apply_to(self.name)


def _apply_when_imported(module: ModuleType, registry: PatchRegistry) -> None:
    spec = module.__spec__
    assert spec is not None
    spec.__class__ = _WatchedSpec
    vars(spec)["_hf_megatron_registry"] = registry


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, registry: PatchRegistry):
        self.loader, self.registry = loader, registry

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.registry.apply_to(module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the real loader of a patched module so that the patches follow its execution."""

    def __init__(self, registry: PatchRegistry):
        self.registry = registry

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if not self.registry.watches(fullname):
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.registry)  # type: ignore[arg-type]
            if spec is not None:
                return spec
        return None


PATCH_REGISTRY = PatchRegistry()
