"""A few cases of the campaign of damaged checkpoints (`tests.mutated_files`), and faults that it has to find."""

import pytest

from hf_megatron.conversion import chunks, source
from hf_megatron.conversion.megatron import view
from tests.mutated_files import FINDINGS, drawn, outcome, run_case
from tests.mutated_sources import make_checkpoints

SEED = 1


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("made"))


def test_damaged_files_are_refused_or_read_right(sources, tmp_path):
    seen = set()
    for number in range(60):
        case, verdict, reason = run_case(SEED, number, sources, tmp_path)
        assert verdict not in FINDINGS, (number, case.what, verdict, reason)
        seen |= {case.name, verdict}
    assert seen == {*sources, "refused", "same", "followed"}


def nothing(*arguments):
    return None


FAULTS = {
    "checksums are not compared": (source, "check_record", []),
    "gaps between chunks are not seen": (chunks, "check_cover", []),
    "arguments that contradict the config are not seen": (view, "check_arguments", []),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(sources, tmp_path, monkeypatch, fault):
    module, name, numbers = FAULTS[fault]
    monkeypatch.setattr(module, name, nothing)
    for number in numbers:
        case = drawn(SEED, number, sources, tmp_path / f"{number}")
        verdict, reason = outcome(case, sources[case.name], tmp_path / f"{number}", tmp_path / f"{number}-target")
        assert verdict == "wrong", (number, case.what, verdict, reason)
