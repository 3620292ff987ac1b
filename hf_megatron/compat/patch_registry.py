"""Patch registry: every upstream function and object this library replaces, and how to restore it.

    targets     replaced upstream functions, each with the chain of its patches
    patterns    functions of one name in every module whose name matches a pattern; each found one becomes a patch
    hooks       callbacks registered with an upstream module for the whole process
    instances   attributes replaced on single objects of parallelized models (`instance_patches.py`)

Patching has two phases. `enable()`, which `import hf_megatron` calls, applies the entry points: the functions through
which a model is parallelized, a layout is launched or a sharded checkpoint is read. `activate()` applies all others;
the entry points call it when one of these happens, so a process that does none of them runs upstream's own functions.

In both phases a patch is applied at once if its module is imported, otherwise when it is imported, so that
`import hf_megatron` neither imports optional packages nor has to come first.
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
    """One replacement of one function.

    Attributes:
        target: `module:attribute.path`; the last attribute of a function is a variable of its closure, by which a
            function is replaced under every name that it was imported by before.
        replacement: `module:function`, a function that takes the original (of a class method the function in it) before
            the original's own arguments. It is a name, so that declaring a patch imports nothing.
        stock: what the original does, and why that is not enough for a parallelized model.
        until: when the replacement is no longer needed.
        when: `module:function`, asked with the first argument of each call (`self` of a method); the replacement is
            skipped where it returns `False`. Empty: the replacement runs in every call.
        is_entry_point: applied by `import hf_megatron`, not only once a model is parallelized.
        aliases: modules that import the function by name; it is replaced there, too.
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
        """Whether upstream promises nothing about the target."""
        names = re.split(r"[.:]", self.target)
        return any(name.startswith("_") and not name.endswith("__") for name in names)

    @property
    def module_name(self) -> str:
        return self.target.partition(":")[0]

    @property
    def feature(self) -> str:
        """The module of the replacement without the library's own prefix, such as `trainer.ramp_up`."""
        module_name = self.replacement.partition(":")[0]
        return module_name.removeprefix("hf_megatron.").removeprefix("integrations.")


@dataclass
class PatchedTarget:
    """One upstream function and the chain of its patches, the first declared one outermost.

    Attributes:
        target: as of a `Patch`.
        patches: in declared order; each one's `original` is the next one, the last one's is upstream's function.
        original: upstream's function while a patch is applied.
        applied: the patches that are in place.
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
        """Applies the patches of a phase; twice is once."""
        wanted = tuple(patch for patch in self.patches if patch.is_entry_point or not entry_points_only)
        if wanted == self.applied:
            return
        self.restore()
        owner, attribute = self._owner()
        attributes = _attributes(owner)
        if attribute not in attributes:
            self._require_other_version()
            return
        # `vars` keeps staticmethod and classmethod objects as they are; `getattr` would bind them.
        self.original = function = attributes[attribute]
        for patch in reversed(wanted):
            function = _replaced(function, patch)
        self._put(function)
        self.applied = wanted

    def _require_other_version(self) -> None:
        # Not at the top: torch's own targets are patched while torch is imported.
        from .versions import is_of_other_versions

        if not is_of_other_versions(self.target):
            raise MegatronError(
                f"{self.target} does not exist in the installed {self.module_name.partition('.')[0]}: this version is "
                "outside the range hf_megatron supports (see docs/versions.md)."
            )

    def restore(self) -> None:
        """Puts upstream's own function back; twice is once."""
        if self.applied:
            self._put(self.original)
            self.applied = ()

    def _put(self, function: Any) -> None:
        owner, attribute = self._owner()
        before = _attributes(owner)[attribute]
        _set(owner, attribute, function)
        for name in dict.fromkeys(alias for patch in self.patches for alias in patch.aliases):
            module = sys.modules.get(name)
            # Another function may have taken the name since.
            if module is not None and vars(module).get(attribute) is before:
                setattr(module, attribute, function)


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
        if not module_name.startswith(self.pattern.partition("*")[0]) or module_name in self.excluded:
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


def _resolve(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    return getattr(importlib.import_module(module_name), function)


def _names(function: Any) -> tuple[str, str]:
    return function.__name__, function.__qualname__


def _replaced(original: Any, patch: Patch) -> Any:
    """Wraps a function, static method, class method or property as the same kind of thing.

    A stack trace shows the wrapper as `function[feature]`. A method's `__qualname__` has the feature too; a module's
    function keeps its own, because pickle finds the function by it.
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
    """Something registered with an upstream module; `make` is `module:function` and returns a handle to remove it."""

    module_name: str
    make: str
    handle: Any = None

    def apply(self, *, entry_points_only: bool = False) -> None:
        """Registers the hook, which is no entry point; twice is once."""
        if self.handle is None and not entry_points_only:
            self.handle = _resolve(self.make)()

    def restore(self) -> None:
        """Removes what was registered; twice is once."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class Instance(Protocol):
    """What is replaced on the objects of one parallelized model."""

    def apply(self) -> None:
        """Puts the replacements in place; twice is once."""

    def restore(self) -> None:
        """Puts back what was there."""


@dataclass
class PatchRegistry:
    """Patches, hooks and patched instances of the process, in the order they were declared.

    Attributes:
        enabled: whether the entry points are applied.
        is_active: whether the other patches and the hooks are applied, too, while `enabled`.
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
        """Adds a patch to the end of its target's chain, next to upstream's function; twice is once."""
        target = self.targets.setdefault(patch.target, PatchedTarget(patch.target))
        if patch not in target.patches:
            target.patches.append(patch)
            self._modules.add(patch.module_name)
            if patch.is_entry_point:
                self._entry_modules.add(patch.module_name)
            if self.enabled:
                self._apply([target])

    def declare_pattern(self, pattern: ModulePatternPatch) -> None:
        """Declares a patch of every module that matches; twice is once."""
        self.patterns.setdefault(pattern.target, pattern)

    def declare_hook(self, module_name: str, make: str) -> None:
        """Declares a hook of an upstream module; twice is once."""
        self.hooks.setdefault(make, Hook(module_name, make))
        self._modules.add(module_name)

    def _entries(self) -> list[PatchedTarget | Hook]:
        return [*self.targets.values(), *self.hooks.values()]

    def watches(self, module_name: str) -> bool:
        """Returns whether something is applied when a module of this name is imported."""
        # Called for every import of the process: one look-up, and patterns only for modules of their package.
        if not self.is_active:
            return module_name in self._entry_modules
        return module_name in self._modules or any(pattern.matches(module_name) for pattern in self.patterns.values())

    def _declare_matches(self, module_name: str) -> None:
        """Declares the patches of a module that patterns find in it, unless they are declared already."""
        for pattern in self.patterns.values():
            if pattern.matches(module_name) and f"{module_name}:{pattern.attribute}" not in self.targets:
                patch = pattern.patch_of(sys.modules[module_name])
                if patch is not None:
                    self.targets[patch.target] = PatchedTarget(patch.target, [patch])

    def enable(self) -> None:
        """Applies the entry points, and everything else if it was active before; twice is once."""
        if self.enabled:
            return
        self.enabled = True
        self._finder.install()
        self._apply_to_imported()

    def activate(self) -> None:
        """Applies all patches and hooks, now or when their modules are imported; twice is once.

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
        """Applies entries whose modules are imported, and waits for those that are being imported."""
        for entry in entries:
            module = sys.modules.get(entry.module_name)
            if module is None:
                continue
            if is_initializing(module):
                # As where one of TRL's own scripts imports torch, which imports this library.
                call_when_initialized(module, self)
            else:
                entry.apply(entry_points_only=not self.is_active)

    def disable(self) -> None:
        """Restores the identical original function objects, and removes what was registered."""
        self._finder.remove()
        for instance in self.instances:
            instance.restore()
        for entry in reversed(self._entries()):
            entry.restore()
        self.enabled = False

    def apply_to(self, module_name: str) -> None:
        """Applies what is declared for a module that has just been imported."""
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
