"""Tests that every cure that an error names is followed by a test."""

import ast
import re

import pytest

from tests.helpers.cures import ROOT, list_cures, read_record


def test_every_cure_is_listed():
    found = {(file, cure) for file, cures in list_cures().items() for cure in cures}
    listed = {(file, cure) for file, cures in read_record().items() for cure in cures}
    assert not found - listed, "follow these cures in a test, and list it in tests/data/cures.json"
    assert not listed - found, "no error names these cures any longer"


@pytest.mark.parametrize("place", sorted({place for cures in read_record().values() for place in cures.values()}))
def test_listed_places_exist(place):
    kind, _, reason = place.partition(": ")
    if kind == "external":
        assert len(reason.split()) > 3
        return
    file, _, name = place.partition("::")
    names = {
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))) if isinstance(node, ast.FunctionDef)
    }
    assert re.sub(r"\[.*", "", name) in names
