"""Tests that public modules export existing names, and that docs and examples import only from them."""

import ast
import importlib
import inspect
import re

import pytest

import hf_megatron
from hf_megatron import PUBLIC_MODULES, errors
from tests.structure import ROOT

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*", "model_cards/*.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py")
)
_IMPORT = re.compile(r"^ *from (hf_megatron[\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)


def _list_imports(text: str) -> list[tuple[str, str]]:
    """Lists (module, name) of every import from this library in a page or a script."""
    imports = []
    for module, names in _IMPORT.findall(text):
        listed = re.sub(r"#.*", "", names).strip("() \n").split(",")
        imports += [(module, name.split(" as ")[0].strip()) for name in listed if name.strip()]
    return imports


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_every_public_name_exists(name):
    module = importlib.import_module(name)
    assert module.__all__ and set(module.__all__) <= set(dir(module))
    for public in module.__all__:
        assert not inspect.ismodule(getattr(module, public)), f"{name}.{public} is a module"
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_import_from_public_modules(page):
    for module, name in _list_imports(page.read_text(encoding="utf-8")):
        assert module in PUBLIC_MODULES, f"{module} is not public"
        assert name in importlib.import_module(module).__all__, f"{module}.{name} is not public"


def test_private_imports_are_detected():
    text = "```python\nfrom hf_megatron.core.mesh import (\n    ParallelMesh,\n)\n```"
    assert _list_imports(text) == [("hf_megatron.core.mesh", "ParallelMesh")]


def test_every_error_is_exported():
    tree = ast.parse((ROOT / "hf_megatron" / "errors.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert names <= set(hf_megatron.__all__)
    assert all(issubclass(getattr(errors, name), hf_megatron.MegatronError) for name in names)
