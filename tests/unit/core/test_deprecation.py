"""Tests of deprecation warnings: what they say, and that nothing stays after the version that removes it."""

import ast
import re

import pytest

from hf_megatron.compat.versions import __version__
from hf_megatron.core.deprecation import deprecated
from tests.structure import list_files


def find_deprecations(source):
    """Returns the `removed_in` of every call of `deprecated`; `None` where it is not a version."""
    versions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "deprecated":
            values = {keyword.arg: keyword.value for keyword in node.keywords}
            value = values.get("removed_in")
            is_version = isinstance(value, ast.Constant) and re.fullmatch(r"\d+\.\d+\.\d+", str(value.value))
            versions.append(value.value if is_version else None)
    return versions


def is_due(removed_in, version):
    """Returns whether a version is the one that removes something, or a later one."""
    return removed_in is None or [*map(int, removed_in.split("."))] <= [*map(int, re.findall(r"\d+", version)[:3])]


def old_function():
    deprecated("old_function()", instead="new_function()", removed_in="99.0.0")


def test_warning_names_the_replacement_and_the_caller():
    with pytest.warns(
        FutureWarning, match=r"old_function\(\) is deprecated .* 99\.0\.0\. Use new_function\(\)\."
    ) as log:
        old_function()
    assert log[0].filename == __file__


def test_nothing_deprecated_is_due():
    due = {
        module: versions
        for module, path in list_files().items()
        if (versions := [v for v in find_deprecations(path.read_text(encoding="utf-8")) if is_due(v, __version__)])
    }
    assert due == {}


@pytest.mark.parametrize(
    ("call", "is_due_in_1_2"),
    [
        ('deprecated("a", instead="b", removed_in="1.2.0")', True),
        ('deprecation.deprecated("a", instead="b", removed_in="0.9.0")', True),
        ('deprecated("a", instead="b", removed_in=NEXT)', True),
        ('deprecated("a", instead="b", removed_in="next")', True),
        ('deprecated("a", instead="b", removed_in="1.10.0")', False),
    ],
)
def test_due_deprecations_are_found(call, is_due_in_1_2):
    [version] = find_deprecations(call)
    assert is_due(version, "1.2.0") is is_due_in_1_2
