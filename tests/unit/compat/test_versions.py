"""One range of versions: what pip installs, what is warned of, and what the matrix runs."""

import json
import re

import pytest

from hf_megatron.compat.versions import CHECKED
from tests.matrix import COMBINATIONS, NEWEST, OLDEST, outcomes, load_rows, render_table
from tests.structure import ROOT


def test_pip_installs_what_was_checked():
    # Python 3.10 has no reader of TOML.
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for library, (first, last) in CHECKED.items():
        found = re.search(rf'^ *"{library}>=([\d.]+),<(\d+)\.(\d+)",$', project, re.MULTILINE)
        assert found is not None, library
        assert (found[1], f"{found[2]}.{int(found[3]) - 1}") == (first, last), library


def test_each_supported_version_is_in_a_combination():
    assert {library: (OLDEST[library], NEWEST[library]) for library in NEWEST} == CHECKED
    for library, (first, last) in CHECKED.items():
        major, minor = last.split(".")
        supported = {f"{major}.{number}" for number in range(int(first.split(".")[1]), int(minor) + 1)}
        assert supported == {combination[library] for combination in COMBINATIONS.values()}, library


def test_rows_are_of_the_versions_they_are_named_by():
    for name, row in load_rows().items():
        for library, minor in COMBINATIONS[name].items():
            version = row["versions"].get(library)
            assert version is None or version.startswith(f"{minor}."), (name, library)


def test_the_table_says_what_was_not_run():
    lines = render_table().splitlines()
    for name, row in load_rows().items():
        ran = row["passed"] + row["skipped"] + len(row["failed"])
        [line] = [line for line in lines if line.startswith(f"| {name} |")]
        assert ("| all |" in line) == (ran == row["first tier"])
        assert all(f"- {name}: `{test}`" in lines for test in row["failed"])


@pytest.mark.parametrize("order", [("passed", "failed"), ("failed", "passed")])
def test_a_failure_stays_one(tmp_path, order):
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps({"test": "a", "outcome": outcome}) + "\n" for outcome in order))
    assert outcomes(file) == {"a": "failed"}
