"""Tests of the library's layering: downward imports, no circular imports, unique public names."""

import ast

from tests.structure import ORDER, circles, component_name, find_upward_imports, list_files, list_public_names


def test_every_package_has_a_layer():
    rooms = [name for names in ORDER for name in names]
    assert len(rooms) == len(set(rooms))
    assert {component_name(module) for module in list_files()} == set(rooms)


def test_imports_point_downwards():
    assert find_upward_imports() == []


def test_no_circular_imports():
    assert circles() == []


# Names defined in several files with the same meaning.
SHARED_NAMES = {
    "place": "the face of an axis",
    "install": "the face of an axis",
    "init": "replaces an `__init__`",
    "clip_grad_norm_": "replaces the function of that name",
    "gather": "over ranks",
    "save": "replaces the function of that name",
    "prepare_optimizer": "Accelerate's calls ours",
    "Pipeline": "the protocol and what has it",
    "compare": "the command calls the function",
    "convert": "the command calls the function",
    "convert_adapter": "the command calls the function",
    "dry_run": "the command calls the function",
}


def test_a_public_name_has_one_meaning():
    shared = {name: modules for name, modules in list_public_names().items() if len(modules) > 1}
    assert shared.keys() == SHARED_NAMES.keys(), {
        name: shared.get(name) for name in shared.keys() ^ SHARED_NAMES.keys()
    }


# First words of a docstring that describes a thing instead of an action.
NOUNS = {"What", "Where", "Whether", "How", "Which", "The", "A", "An", "This", "All", "Every", "Those"}


def test_function_docstrings_begin_with_a_verb():
    violations = []
    for module, path in list_files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            is_property = isinstance(node, ast.FunctionDef) and any(
                "property" in ast.unparse(d) for d in node.decorator_list
            )
            if text and not is_property and (text.split()[0] in NOUNS or text.startswith("`")):
                violations.append(f"{module}.{node.name}: {text.splitlines()[0]}")
    assert violations == []
