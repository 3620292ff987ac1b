"""Tests that pip requirements, version checks and the test matrix use one range of versions."""

import json
import re

import pytest

from hf_megatron.compat import versions
from hf_megatron.compat.versions import CHECKED
from tests.matrix import COMBINATIONS, NEWEST, OLDEST, load_rows, outcomes, render_table
from tests.structure import ROOT


def test_pip_version_ranges_match_checked_versions():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for library, (first, last) in CHECKED.items():
        match = re.search(rf'^ *"{library}>=([\d.]+),<(\d+)\.(\d+)",$', project, re.MULTILINE)
        assert match is not None, library
        assert (match[1], f"{match[2]}.{int(match[3]) - 1}") == (first, last), library


@pytest.mark.parametrize(("rank", "warns"), [(None, True), ("0", True), ("1", False)])
def test_only_the_first_rank_warns_of_untested_versions(rank, warns, monkeypatch, recwarn):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(versions, "installed_version", lambda library: "99.1")
    versions._warn_unchecked_version.cache_clear()
    versions.warn_unchecked_versions()
    versions._warn_unchecked_version.cache_clear()
    assert any("was not tested with torch 99.1" in str(warning.message) for warning in recwarn) == warns


def test_every_supported_version_is_in_the_matrix():
    assert {library: (OLDEST[library], NEWEST[library]) for library in NEWEST} == CHECKED
    for library, (first, last) in CHECKED.items():
        major, minor = last.split(".")
        supported = {f"{major}.{version}" for version in range(int(first.split(".")[1]), int(minor) + 1)}
        assert supported == {combination[library] for combination in COMBINATIONS.values()}, library


def test_recorded_versions_match_combination_names():
    for name, run in load_rows().items():
        for library, minor in COMBINATIONS[name].items():
            version = run["versions"].get(library)
            assert version is None or version.startswith(f"{minor}."), (name, library)


def test_table_reports_incomplete_runs_and_failures():
    lines = render_table().splitlines()
    for name, run in load_rows().items():
        test_count = run["passed"] + run["skipped"] + len(run["failed"])
        [line] = [line for line in lines if line.startswith(f"| {name} |")]
        assert (" run)" not in line) == (test_count == run["first tier"])
        assert all(f"- {name}: `{test}`" in lines for test in run["failed"])


@pytest.mark.parametrize("order", [("passed", "failed"), ("failed", "passed")])
def test_failure_overrides_other_outcomes(tmp_path, order):
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps({"test": "a", "outcome": outcome}) + "\n" for outcome in order))
    assert outcomes(file) == {"a": "failed"}
