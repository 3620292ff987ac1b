"""Patch registry: every upstream function and object this library replaces, and how to restore it.

    targets     replaced upstream functions, each with the chain of its patches
    patterns    functions with a given name in all modules that match a pattern; each match becomes a patch
    hooks       callbacks registered with an upstream module for the whole process
    instances   attributes replaced on single objects of parallelized models (`instance_patches.py`)

Patching has two phases. `enable()`, which `import hf_megatron` calls, applies the entry points: the functions through
which a model is parallelized, a layout is launched or a sharded checkpoint is read. `activate()` applies all others;
the entry points call it on first use, so a process that uses none of them runs upstream's own functions.

In both phases a patch is applied immediately if its module is imported, otherwise after its import, so `import
hf_megatron` neither imports optional packages nor has to come first.
"""

import fnmatch
import functools
import importlib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any, Protocol

from ..errors import MegatronError
from .import_hook import ImportFinder, call_when_initialized, is_initializing


@dataclass(frozen=True)
class Patch:
    """Replacement of one function.

    Attributes:
        target: `module:attribute.path`; if the path leads into a function, the last attribute is a variable of its
            closure; replacing that also affects references imported earlier under any name.
        replacement: `module:function`, a function that takes the original (for a class method, the underlying
            function) before the original's own arguments. It is a name, so that declaring a patch imports nothing.
        stock: behavior of the original, and the reason it does not suffice for a parallelized model.
        until: condition under which the patch is no longer needed.
        when: `module:function`, called with the first argument of each call (`self` of a method); if it returns
            `False`, the original runs. Empty: the replacement always runs.
        is_entry_point: whether `import hf_megatron` applies the patch, rather than the first parallelized model.
        aliases: modules that import the function by name, in which it is replaced too.
    """

    target: str
    replacement: str
    stock: str
    until: str
    when: str = ""
    is_entry_point: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether the target is a private upstream name."""
        names = re.split(r"[.:]", self.target)
        return any(name.startswith("_") and not name.endswith("__") for name in names)

    @property
    def module_name(self) -> str:
        return self.target.partition(":")[0]

    @property
    def feature(self) -> str:
        """Module of the replacement without the library's own prefix, such as `trainer.ramp_up`."""
        module_name = self.replacement.partition(":")[0]
        return module_name.removeprefix("hf_megatron.").removeprefix("integrations.")


@dataclass
class PatchedTarget:
    """One upstream function and the chain of its patches, the first declared one outermost.

    Attributes:
        target: as in `Patch`.
        patches: in declared order; each patch's `original` is the next patch, the last patch's is upstream's function.
        original: upstream's function while a patch is applied.
        applied: the patches that are applied.
    """

    target: str
    patches: list[Patch] = field(default_factory=list)
    original: Any = None
    applied: tuple[Patch, ...] = ()

    @property
    def module_name(self) -> str:
        return self.target.partition(":")[0]

    def _owner(self) -> tuple[Any, str]:
        owner: Any = sys.modules[self.module_name]
        *path, attribute = self.target.partition(":")[2].split(".")
        for name in path:
            owner = getattr(owner, name)
        return owner, attribute

    def apply(self, *, entry_points_only: bool = False) -> None:
        """Applies the patches of a phase; idempotent."""
        phase_patches = tuple(patch for patch in self.patches if patch.is_entry_point or not entry_points_only)
        if phase_patches == self.applied:
            return
        self.restore()
        owner, attribute = self._owner()
        attributes = _attributes(owner)
        if attribute not in attributes:
            self._require_other_version()
            return
        # `vars` keeps staticmethod and classmethod objects as they are; `getattr` would bind them.
        self.original = function = attributes[attribute]
        for patch in reversed(phase_patches):
            function = _replaced(function, patch)
        self._put(function)
        self.applied = phase_patches

    def _require_other_version(self) -> None:
        # Imported lazily: torch's own targets are patched while torch is being imported.
        from .versions import is_for_other_version

        if not is_for_other_version(self.target):
            raise MegatronError(
                f"{self.target} does not exist in the installed {self.module_name.partition('.')[0]}: this version is "
                "outside the range hf_megatron supports (see docs/versions.md)."
            )

    def restore(self) -> None:
        """Restores upstream's function; idempotent."""
        if self.applied:
            self._put(self.original)
            self.applied = ()

    def _put(self, function: Any) -> None:
        owner, attribute = self._owner()
        before = _attributes(owner)[attribute]
        _set(owner, attribute, function)
        for name in dict.fromkeys(alias for patch in self.patches for alias in patch.aliases):
            module = sys.modules.get(name)
            # Another function may have replaced the name in the meantime.
            if module is not None and vars(module).get(attribute) is before:
                setattr(module, attribute, function)


@dataclass(frozen=True)
class ModulePatternPatch:
    """Replacement of a function, identified by name and parameters, in every module that defines it.

    A module is searched when it is imported. It must define the function itself; a function of this name with other
    parameters is left unchanged.

    Attributes:
        pattern: pattern of module names; `*` matches any text without a dot.
        attribute: the name of the function.
        parameters: the names of all of its parameters, in order.
        replacement, stock, until: as in `Patch`.
        excluded: modules whose function is left unchanged.
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
        if not module_name.startswith(self.pattern.partition("*")[0]) or module_name in self.excluded:
            return False
        names, patterns = module_name.split("."), self.pattern.split(".")
        return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))

    def get_patch(self, module: ModuleType) -> Patch | None:
        """Returns the patch of a module's function; `None` if the module defines no such function."""
        # Use `vars`: in a package with lazy imports, `getattr` would trigger one.
        function = vars(module).get(self.attribute)
        if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
            return None
        if tuple(inspect.signature(function).parameters) != self.parameters:
            return None
        return Patch(f"{module.__name__}:{self.attribute}", self.replacement, self.stock, self.until)


def _cells(owner: FunctionType) -> dict[str, CellType]:
    return dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Returns the replaceable attributes of an object, or the closure variables of a function."""
    if isinstance(owner, FunctionType):
        return {name: cell.cell_contents for name, cell in _cells(owner).items()}
    return vars(owner)


def _set(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, FunctionType):
        _cells(owner)[attribute].cell_contents = value
    else:
        setattr(owner, attribute, value)


def _resolve(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    return getattr(importlib.import_module(module_name), function)


def _names(function: Any) -> tuple[str, str]:
    return function.__name__, function.__qualname__


def _replaced(original: Any, patch: Patch) -> Any:
    """Wraps a function, static method, class method or property in an object of the same type.

    A stack trace shows the wrapper as `function[feature]`. A method's `__qualname__` includes the feature too; a
    module-level function keeps its `__qualname__`, because pickle finds the function by it.
    """
    if isinstance(original, (classmethod, staticmethod)):
        return type(original)(_replaced(original.__func__, patch))
    if isinstance(original, property):
        return property(_replaced(original.fget, patch))
    function = _resolve(patch.replacement)
    if patch.when:
        applies = _resolve(patch.when)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not applies(*args[:1]):
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)
    else:

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

    name, qualname = (f"{text.partition('[')[0]}[{patch.feature}]" for text in _names(original))
    replacement.__code__ = replacement.__code__.replace(co_name=name, co_qualname=qualname)
    functools.update_wrapper(replacement, original)
    if "." in qualname.partition("[")[0].rpartition("<locals>.")[2]:
        replacement.__qualname__ = qualname
    return replacement


@dataclass
class Hook:
    """Callback registered with an upstream module; `make` is `module:function` and returns a handle to remove it."""

    module_name: str
    make: str
    handle: Any = None

    def apply(self, *, entry_points_only: bool = False) -> None:
        """Registers the hook, which is not an entry point; idempotent."""
        if self.handle is None and not entry_points_only:
            self.handle = _resolve(self.make)()

    def restore(self) -> None:
        """Removes the registered hook; idempotent."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class Instance(Protocol):
    """Replacements on the objects of one parallelized model."""

    def apply(self) -> None:
        """Applies the replacements; idempotent."""

    def restore(self) -> None:
        """Restores the originals."""


@dataclass
class PatchRegistry:
    """Patches, hooks and patched instances of the process, in declaration order.

    Attributes:
        enabled: whether the entry points are applied.
        is_active: whether the other patches and the hooks are applied too, while `enabled`.
    """

    targets: dict[str, PatchedTarget] = field(default_factory=dict)
    patterns: dict[str, ModulePatternPatch] = field(default_factory=dict)
    hooks: dict[str, Hook] = field(default_factory=dict)
    instances: "weakref.WeakSet[Instance]" = field(default_factory=weakref.WeakSet)
    enabled: bool = False
    is_active: bool = False

    def __post_init__(self) -> None:
        self._finder = ImportFinder(self)
        self._modules: set[str] = set()
        self._entry_modules: set[str] = set()

    def declare(self, patch: Patch) -> None:
        """Appends a patch to its target's chain, closest to upstream's function; idempotent."""
        target = self.targets.setdefault(patch.target, PatchedTarget(patch.target))
        if patch not in target.patches:
            target.patches.append(patch)
            self._modules.add(patch.module_name)
            if patch.is_entry_point:
                self._entry_modules.add(patch.module_name)
            if self.enabled:
                self._apply([target])

    def declare_pattern(self, pattern: ModulePatternPatch) -> None:
        """Declares a patch of every matching module; idempotent."""
        self.patterns.setdefault(pattern.target, pattern)

    def declare_hook(self, module_name: str, make: str) -> None:
        """Declares a hook of an upstream module; idempotent."""
        self.hooks.setdefault(make, Hook(module_name, make))
        self._modules.add(module_name)

    def _entries(self) -> list[PatchedTarget | Hook]:
        return [*self.targets.values(), *self.hooks.values()]

    def watches(self, module_name: str) -> bool:
        """Returns whether the import of this module triggers a patch or a hook."""
        # Called for every import of the process: one lookup, and patterns only for modules of their package.
        if not self.is_active:
            return module_name in self._entry_modules
        return module_name in self._modules or any(pattern.matches(module_name) for pattern in self.patterns.values())

    def _declare_matches(self, module_name: str) -> None:
        """Declares the patches that patterns match in a module, unless they are already declared."""
        for pattern in self.patterns.values():
            if pattern.matches(module_name) and f"{module_name}:{pattern.attribute}" not in self.targets:
                patch = pattern.get_patch(sys.modules[module_name])
                if patch is not None:
                    self.targets[patch.target] = PatchedTarget(patch.target, [patch])

    def enable(self) -> None:
        """Applies the entry points, and everything else if it was active before; idempotent."""
        if self.enabled:
            return
        self.enabled = True
        self._finder.install()
        self._apply_to_imported()

    def activate(self) -> None:
        """Applies all patches and hooks, now or when their modules are imported; idempotent.

        After `disable()` the call has no effect until `enable()`.
        """
        if self.is_active:
            return
        self.is_active = True
        if self.enabled:
            self._apply_to_imported()

    def _apply_to_imported(self) -> None:
        if self.is_active:
            for name, imported in list(sys.modules.items()):
                if any(pattern.matches(name) for pattern in self.patterns.values()):
                    if is_initializing(imported):
                        call_when_initialized(imported, self)
                    else:
                        self._declare_matches(name)
        self._apply(self._entries())
        for instance in self.instances:
            instance.apply()

    def _apply(self, entries: Sequence[PatchedTarget | Hook]) -> None:
        """Applies entries whose modules are imported; defers entries of modules that are being imported."""
        for entry in entries:
            module = sys.modules.get(entry.module_name)
            if module is None:
                continue
            if is_initializing(module):
                # Happens if one of TRL's scripts imports torch, which imports this library.
                call_when_initialized(module, self)
            else:
                entry.apply(entry_points_only=not self.is_active)

    def disable(self) -> None:
        """Restores the identical original function objects, and removes the registered hooks."""
        self._finder.remove()
        for instance in self.instances:
            instance.restore()
        for entry in reversed(self._entries()):
            entry.restore()
        self.enabled = False

    def apply_to(self, module_name: str) -> None:
        """Applies the entries declared for a module that has just been imported."""
        if self.is_active:
            self._declare_matches(module_name)
        for entry in self._entries():
            if entry.module_name == module_name:
                entry.apply(entry_points_only=not self.is_active)

    def import_replacements(self) -> None:
        """Imports the replacements of every imported module, so that forked processes need not."""
        for target in self.targets.values():
            for patch in target.patches if target.module_name in sys.modules else ():
                _resolve(patch.replacement)
        for hook in self.hooks.values():
            if hook.module_name in sys.modules:
                _resolve(hook.make)


PATCH_REGISTRY = PatchRegistry()
