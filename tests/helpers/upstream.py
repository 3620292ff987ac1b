"""Fingerprints of the upstream code that this library replaces or calls by private names.

    patches       functions replaced by `integrations/patch_table.py`
    copies        functions that a pattern of the table matches in any module
    symbols       names that `compat/` imports from upstream libraries, and attribute chains that start at them
    attributes    private attributes that `compat/` reads from objects, searched for by name only
    model types   of transformers, with the code of each

A fingerprint is a hash of the source without comments, docstrings and indentation, so that it is the same on every
Python version. `python -m tests.helpers.upstream FILE` writes those of the current environment.
"""

import ast
import contextlib
import fnmatch
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tests.structure import ROOT, list_files

LIBRARIES = (
    "torch", "transformers", "accelerate", "trl", "peft", "sentence_transformers", "liger_kernel", "bitsandbytes",
)  # fmt: skip
COMPAT = ROOT / "hf_megatron" / "compat"
# Attributes of this library's own objects and of Python's.
_OWN = re.compile(r"_hf_megatron|__\w+__$")


@dataclass
class Fingerprint:
    """One upstream function, class or object.

    Attributes:
        used_by: `Patch` replacements and files of `compat/` that depend on it.
        kind: `function`, `class`, `module`, the name of a type, or `missing`.
        defined_in: `module:qualname` of its definition.
        digest: hash of its source; empty if it has none.
        source: not part of the committed record.
    """

    used_by: list[str] = field(default_factory=list)
    kind: str = "missing"
    defined_in: str = ""
    digest: str = ""
    source: str = ""


@dataclass
class Snapshot:
    """Fingerprints of one environment: `module:attribute.path` -> fingerprint, and model type -> hash of its code."""

    versions: dict[str, str]
    patches: dict[str, Fingerprint]
    copies: dict[str, Fingerprint]
    symbols: dict[str, Fingerprint]
    attributes: dict[str, list[str]]
    missing_attributes: list[str]
    model_types: dict[str, str]

    def tables(self) -> Mapping[str, dict[str, Fingerprint]]:
        """Returns the fingerprints by section."""
        return {"patches": self.patches, "copies": self.copies, "symbols": self.symbols}

    def write(self, path: Path, *, with_sources: bool) -> None:
        """Writes the snapshot as JSON, sorted by name."""
        content = asdict(self)
        for table in ("patches", "copies", "symbols"):
            for entry in content[table].values():
                if not with_sources:
                    del entry["source"]
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Reads a snapshot; sources may be missing."""
        content = json.loads(path.read_text(encoding="utf-8"))
        for table in ("patches", "copies", "symbols"):
            content[table] = {name: Fingerprint(**entry) for name, entry in content[table].items()}
        return cls(**content)


def normalize_source(source: str) -> str:
    """Returns source without docstrings, comment lines, blank lines and indentation."""
    lines = textwrap.dedent(source).splitlines()
    dropped = set()
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:  # a lambda within an expression
        tree = ast.Module(body=[], type_ignores=[])
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            text = node.body[0]
            dropped.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    kept = (line.strip() for number, line in enumerate(lines, 1) if number not in dropped)
    return "\n".join(line for line in kept if line and not line.startswith("#"))


def compute_digest(source: str) -> str:
    """Returns the hash of normalized source."""
    return hashlib.sha256(normalize_source(source).encode()).hexdigest()[:16]


def find_target(target: str) -> Any:
    """Returns the object of a patch target: what its owner itself defines, unbound.

    Raises:
        LookupError: the module or a name does not exist.
    """
    module_name, _, path = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LookupError(str(error)) from error
    for name in path.split(".") if path else ():
        if isinstance(value, FunctionType) and name in value.__code__.co_freevars:
            value = (value.__closure__ or ())[value.__code__.co_freevars.index(name)].cell_contents
            continue
        if isinstance(value, ModuleType) and hasattr(value, "__path__") and not hasattr(value, name):
            # A submodule is an attribute of its package only once it is imported.
            with contextlib.suppress(ModuleNotFoundError):
                value = importlib.import_module(f"{value.__name__}.{name}")
                continue
        try:
            # Classes are searched statically, so that class methods and properties stay unbound.
            value = inspect.getattr_static(value, name) if isinstance(value, type) else getattr(value, name)
        except AttributeError as error:
            raise LookupError(f"{target}: no {name}") from error
    return value


def take_fingerprint(target: str, used_by: list[str]) -> Fingerprint:
    """Returns the fingerprint of a target in this environment; its kind is `missing` if there is none."""
    try:
        value = find_target(target)
    except (LookupError, ImportError):
        return Fingerprint(used_by)
    if isinstance(value, ModuleType):
        return Fingerprint(used_by, "module", value.__name__)
    value = getattr(value, "__func__", value)
    value = value.fget if isinstance(value, property) else value
    is_class = isinstance(value, type)
    if not is_class and not callable(value):
        return Fingerprint(used_by, type(value).__name__)
    value = inspect.unwrap(value)
    defined_in = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    kind = "class" if is_class else "function"
    if is_class and not any(name.startswith("_") for name in re.split(r"[.:]", target)):
        # Only the existence of a public class matters: upstream keeps its interface stable.
        return Fingerprint(used_by, kind, defined_in)
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):  # implemented in C++
        return Fingerprint(used_by, kind, defined_in)
    return Fingerprint(used_by, kind, defined_in, compute_digest(source), normalize_source(source))


# Names in compat/


class _Names(ast.NodeVisitor):
    """Collects the upstream names of one file: imported ones, attribute chains from them, other private attributes."""

    def __init__(self) -> None:
        self.symbols: set[str] = set()
        self.attributes: set[str] = set()
        # Local name -> `module:attribute`.
        self._bound: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] in LIBRARIES:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self._bound[alias.asname or name] = f"{name}:"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").partition(".")[0] in LIBRARIES:
            for alias in node.names:
                self._bound[alias.asname or alias.name] = f"{node.module}:{alias.name}"
                self.symbols.add(f"{node.module}:{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in self._bound:
            start = self._bound[value.id]
            path = ".".join(reversed(names))
            self.symbols.add(f"{start}{path}" if start.endswith(":") else f"{start}.{path}")
            return
        is_own = isinstance(value, ast.Name) and value.id in ("self", "cls")
        self.attributes.update(name for name in names if name.startswith("_") and not is_own)
        self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                self.attributes.add(str(name.value))
        self.generic_visit(node)


def list_compat_names() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns upstream symbols and private attributes -> the files of `compat/` that use them."""
    symbols: dict[str, list[str]] = {}
    attributes: dict[str, list[str]] = {}
    own_names = {
        node.name
        for path in list_files().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    for path in sorted(COMPAT.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = _Names()
        names.visit(tree)
        for name in names.symbols:
            symbols.setdefault(name, []).append(f"compat/{path.name}")
        for name in names.attributes:
            if not _OWN.match(name):
                attributes.setdefault(name, []).append(f"compat/{path.name}")
    return symbols, {name: files for name, files in attributes.items() if name not in own_names}


@cache
def list_private_names(library: str) -> frozenset[str]:
    """Returns the private identifiers that occur in a library's Python files and compiled libraries."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return frozenset()
    names: set[bytes] = set()
    for pattern in ("*.py", "*.pyi", "libtorch_python.so", "tokenizers*.so"):
        for path in Path(spec.origin).parent.rglob(pattern):
            names.update(re.findall(rb"(?<![A-Za-z0-9])_[A-Za-z]\w*", path.read_bytes()))
    return frozenset(name.decode() for name in names)


def find_moved(target: str) -> str:
    """Returns the modules of a target's library that define its last name, as text; empty if there are none."""
    module_name, _, path = target.partition(":")
    name = path.rpartition(".")[2]
    library = module_name.partition(".")[0]
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None or not name:
        return ""
    folder = Path(spec.origin).parent
    definition = re.compile(rf"^\s*(?:(?:async )?def|class) {re.escape(name)}\b", re.MULTILINE)
    files = (file for file in folder.rglob("*.py") if definition.search(file.read_text(encoding="utf-8")))
    return ", ".join(sorted(".".join((library, *file.relative_to(folder).with_suffix("").parts)) for file in files)[:4])


# Functions that patterns match


def iter_copies() -> Iterator[tuple[str, Fingerprint]]:
    """Yields the functions of transformers' files that match a pattern, without importing the files."""
    from hf_megatron.integrations.patch_table import PATTERNS

    for pattern in PATTERNS:
        package, _, rest = pattern.pattern.partition(".*")
        [folder] = importlib.import_module(package).__path__
        for path in sorted(Path(folder).glob(f"*{rest.replace('.', '/')}.py")):
            module_name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            text = path.read_text(encoding="utf-8")
            if f"def {pattern.attribute}(" not in text or not fnmatch.fnmatchcase(module_name, pattern.pattern):
                continue
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name == pattern.attribute:
                    source = ast.get_source_segment(text, node) or ""
                    parameters = tuple(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
                    kind = "function" if parameters == pattern.parameters else f"function({', '.join(parameters)})"
                    target = f"{module_name}:{node.name}"
                    yield target, Fingerprint([pattern.target], kind, target, compute_digest(source))


# Model types


def hash_model_code() -> dict[str, str]:
    """Returns the hash of each model type's modeling files; empty for a type whose models another folder defines."""
    from transformers import models
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    [folder] = models.__path__
    digests: dict[str, str] = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        paths = sorted(Path(folder, *model_type_to_module_name(model_type).split(".")).glob("modeling_*.py"))
        sources = [path.read_text(encoding="utf-8") for path in paths]
        digests[model_type] = compute_digest("\n".join(sources)) if sources else ""
    return digests


# Snapshots


def take_snapshot() -> Snapshot:
    """Takes the fingerprints of the current environment, with all patches restored."""
    from hf_megatron.compat.patch_registry import PATCH_REGISTRY
    from hf_megatron.integrations.patch_table import PATCHES

    PATCH_REGISTRY.disable()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    replacements: dict[str, list[str]] = {}
    for patch in PATCHES:
        replacements.setdefault(patch.target, []).append(patch.replacement.removeprefix("hf_megatron."))
    symbols, attributes = list_compat_names()
    known = frozenset().union(*map(list_private_names, (*LIBRARIES, "tokenizers")))
    return Snapshot(
        versions={name: metadata.version(name) for name in LIBRARIES if importlib.util.find_spec(name)},
        patches={target: take_fingerprint(target, used_by) for target, used_by in replacements.items()},
        copies=dict(iter_copies()),
        symbols={name: take_fingerprint(name, used_by) for name, used_by in symbols.items()},
        attributes=attributes,
        missing_attributes=sorted(name for name in attributes if name not in known),
        model_types=hash_model_code(),
    )


if __name__ == "__main__":
    take_snapshot().write(Path(sys.argv[1]), with_sources=True)
