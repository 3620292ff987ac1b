"""Tests of the test suite: tiny models are built once, nothing else is shared, and skips are reported."""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from tests import where
from tests.helpers.executed import RECORD
from tests.helpers.references import run_single_process
from tests.helpers.shared_tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]


def make_smaller_tiny_model(**arguments):
    return make_tiny_model(CONFIG_MAPPING["llama"](), sequence_length=7, **arguments)


def get_folder(changes):
    return make_smaller_tiny_model(changes=changes).directory


def test_tiny_model_is_built_once_for_all_ranks():
    changes = {"num_key_value_heads": 1}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.map(get_folder, [changes] * 4, chunksize=1)
    tiny_model = make_smaller_tiny_model(changes=changes)
    assert folders == [tiny_model.directory] * 4
    assert tiny_model.load().config.num_key_value_heads == 1 and tiny_model.reference.loss > 0
    assert tiny_model.directory not in (
        make_smaller_tiny_model().directory,
        make_smaller_tiny_model(changes=changes, seed=1).directory,
    )


def test_reference_runs_once_per_arguments():
    def run(*args, **kwargs):
        return os.getpid(), args, kwargs

    first = run_single_process(run, 1, name="a")
    assert first[1:] == ((1,), {"name": "a"}) and run_single_process(run, 1, name="a") == first
    assert run_single_process(run, 1, name="b")[0] != first[0] != run_single_process(run, 2, name="a")[0]
    # Arguments that cannot be compared are not cached.
    assert run_single_process(run, name=["a"])[0] != run_single_process(run, name=["a"])[0]


def test_ranks_do_not_change_the_parent_process():
    def change():
        os.environ["LEFT_BEHIND"] = "1"
        torch.set_default_dtype(torch.float64)
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert run_ranks(change, 2) == [(1, "1")] * 2
    assert "LEFT_BEHIND" not in os.environ and torch.get_default_dtype() == torch.float32
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()


def test_a_skip_in_a_worker_fails_the_run(tmp_path):
    (tmp_path / "test_skipped.py").write_text("import pytest\ndef test_one(): pytest.skip('why not')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "NOT ON THE ALLOW-LIST" in result.stdout, result.stdout


def test_where_prints_tests_for_a_source_file(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["where", "core/mesh.py"])
    where.main()
    assert "hf_megatron/core/mesh.py" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["where", "no/such/file.py"])
    with pytest.raises(SystemExit):
        where.main()
    assert "no recorded test executes no/such/file.py" in capsys.readouterr().err


def test_recorded_files_exist():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [name for name in {*record, *itertools.chain(*record.values())} if not (ROOT / name).exists()] == []
