"""The layering of the library: imports point downwards, no files import each other, a name has one meaning."""

import ast

from tests.structure import ORDER, circles, list_files, list_public_names, component_name, find_upward_imports


def test_every_room_has_its_floor():
    rooms = [name for names in ORDER for name in names]
    assert len(rooms) == len(set(rooms))
    assert {component_name(module) for module in list_files()} == set(rooms)


def test_imports_point_downwards():
    assert find_upward_imports() == []


def test_no_files_import_each_other():
    assert circles() == []


# Names that stand in several files because they mean the same there.
FACES = {
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
    "plan": "the command prints the function's",
}


def test_a_public_name_has_one_meaning():
    shared = {name: places for name, places in list_public_names().items() if len(places) > 1}
    assert shared.keys() == FACES.keys(), {name: shared.get(name) for name in shared.keys() ^ FACES.keys()}


# First words of a docstring that say what something is, not what it does.
NOUNS = {"What", "Where", "Whether", "How", "Which", "The", "A", "An", "This", "All", "Every", "Those"}


def test_docstrings_of_functions_begin_with_a_verb():
    found = []
    for module, path in list_files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            is_property = isinstance(node, ast.FunctionDef) and any(
                "property" in ast.unparse(d) for d in node.decorator_list
            )
            if text and not is_property and (text.split()[0] in NOUNS or text.startswith("`")):
                found.append(f"{module}.{node.name}: {text.splitlines()[0]}")
    assert found == []
