"""The table of optimizers in docs/data_parallel.md lists the known classes, with their kinds."""

import re
from pathlib import Path

from hf_megatron.data_parallel.optimizer_classes import ELEMENTWISE, LAYER_WISE

PAGE = Path(__file__).parents[3] / "docs" / "data_parallel.md"


def list_documented(kind):
    """Returns the class names in the table's rows of a kind."""
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if f"| {kind} |" in line]
    return {name for row in rows for name in re.findall(r"\b[A-Z][A-Za-z0-9]*[A-Z0-9a-z]\b", row[1])}


def test_table_lists_known_classes():
    for kind, table in (("elementwise", ELEMENTWISE), ("layer-wise", LAYER_WISE)):
        known = {name for names in table.values() for name in names}
        assert known <= list_documented(kind), kind


def test_kinds_are_disjoint():
    assert not any(ELEMENTWISE.get(package, set()) & names for package, names in LAYER_WISE.items())
