"""Tests of the campaign of damaged checkpoints (`tests.helpers.mutated_files`): a few cases, and seeded faults."""

import json
import shutil

import pytest

from hf_megatron.conversion import source
from hf_megatron.conversion.megatron import name_view
from hf_megatron.core.io.safetensors import SafetensorsFile
from tests.helpers.mutated_files import FINDINGS, Case, judge_conversion, make_case, run_case
from tests.helpers.mutated_sources import make_checkpoints

SEED = 1


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("made"))


def test_damaged_files_are_rejected_or_read_correctly(sources, tmp_path):
    outcomes = set()
    for number in range(50):
        case, judgment, reason = run_case(SEED, number, sources, tmp_path)
        assert judgment not in FINDINGS, (number, case.what, judgment, reason)
        outcomes |= {case.name, judgment}
    assert outcomes == {*sources, "refused", "same", "followed"}


def nothing(*arguments):
    return None


def test_campaign_detects_skipped_checksums(sources, tmp_path, monkeypatch):
    case = make_case(SEED, 437, sources, tmp_path / "source")
    assert case.covered
    assert judge_conversion(case, sources[case.name], tmp_path / "source", tmp_path / "target")[0] == "refused"
    monkeypatch.setattr(source, "check_record", nothing)
    assert judge_conversion(case, sources[case.name], tmp_path / "source", tmp_path / "target")[0] == "wrong"


@pytest.mark.parametrize("name", ["megatron_core", "megatron_legacy"])
def test_campaign_detects_permuted_heads(sources, tmp_path, monkeypatch, name):
    """The shapes stay the same, but the rows of query, key and value are permuted."""
    shutil.copytree(sources[name].folder, tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    changed = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changed), encoding="utf-8")
    case = Case(name, "config.json", False, "hf", False, False)
    assert judge_conversion(case, sources[name], tmp_path / "source", tmp_path / "target")[0] == "refused"
    monkeypatch.setattr(name_view, "check_arguments", nothing)
    assert judge_conversion(case, sources[name], tmp_path / "source", tmp_path / "target")[0] == "wrong"


def test_campaign_detects_swapped_tensors(sources, tmp_path, monkeypatch):
    read = SafetensorsFile.read

    def read_swapped_tensor(self, name, *memory):
        return read(self, name.replace("layers.1.input_layernorm", "layers.1.post_attention_layernorm"), *memory)

    case, checkpoint = Case("hf_one", "nothing", False, "hf", False, False), sources["hf_one"]
    assert judge_conversion(case, checkpoint, checkpoint.folder, tmp_path / "right")[0] == "same"
    monkeypatch.setattr(SafetensorsFile, "read", read_swapped_tensor)
    assert judge_conversion(case, checkpoint, checkpoint.folder, tmp_path / "wrong")[0] == "wrong"
