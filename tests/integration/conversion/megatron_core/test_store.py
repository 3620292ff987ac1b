"""Tests of `torch_dist` against megatron-core: its checkpoints are read, and it resumes from rewritten ones."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hf_megatron.conversion.dcp.store_reader import StoreReader
from hf_megatron.conversion.interfaces import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, MegatronModel, Reader
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.conversion.megatron_core.writer import MegatronCoreWriter
from hf_megatron.conversion.output_folder import Output
from tests.helpers.tiny_models import build_tiny_model

ROOT = Path(__file__).parents[4]
PADDED = 256
SEQUENCES = torch.randint(0, 250, (3, 4, 16), generator=torch.Generator().manual_seed(0)).tolist()


@dataclass(frozen=True)
class Case:
    """Model family, the layout that saves, and the layout that resumes from the rewritten checkpoint."""

    family: str
    first: str
    second: str
    gated: bool = True
    ep: int = 1


LAYOUTS = {"tp1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2, "dp": 2}}
CASES = [
    Case("llama", "pp2", "tp2"),
    Case("gpt2", "tp2", "tp1", gated=False),
    Case("qwen3_moe", "tp1", "ep2", ep=2),
    Case("deepseek_v3", "ep2", "tp1"),
]


def run_tasks(folder: Path, tasks: dict[str, list[dict]]) -> dict[str, dict]:
    """Runs tasks, which must all succeed, and returns the results by task name."""
    folder.mkdir()
    launches = [{"name": name, "layout": LAYOUTS[name], "tasks": entries} for name, entries in tasks.items()]
    (folder / "job.json").write_text(json.dumps({"out": str(folder / "out"), "launches": launches}))
    command = [sys.executable, "-m", "tests.megatron_peer.tasks", str(folder / "job.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    results = folder / "out" / "results.json"
    assert results.is_file(), done.stderr[-3000:]
    entries = [task for launch in json.loads(results.read_text())["launches"] for task in launch["tasks"]]
    assert not [(task["name"], task["error"]) for task in entries if not task["ok"]]
    return {task["name"]: task for task in entries}


def task(kind: str, case: Case, hf: Path, name: str = "", **more) -> dict:
    named = {"task": kind, "name": f"{case.family}{name}", "hf": str(hf / case.family), "padded_vocab": PADDED}
    return {**named, "ids": SEQUENCES, **more}


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for case in CASES:
        build_tiny_model(case.family).config.save_pretrained(folder / case.family)
    return folder


@pytest.fixture(scope="module")
def trained(hf, tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """Checkpoints after two steps of each case, and the loss of the third step."""
    folder = tmp_path_factory.mktemp("trained")
    tasks: dict[str, list[dict]] = {name: [] for name in LAYOUTS}
    for case in CASES:
        tasks[case.first].append(task("train_save", case, hf, dir=str(folder / case.family), steps=2))
    llama = CASES[0]
    other = {"steps": 1, "resumed_steps": 0, "sharding": "dp_reshardable"}
    tasks["tp1"].append(task("train_save", llama, hf, "-local", dir=str(folder / "dp_reshardable"), **other))
    apart = {"dir": str(folder / "per_layer"), "non_homogeneous": True}
    tasks["tp1"].append({**task("save", llama, hf, "-layers", **apart), "ids": SEQUENCES[0]})
    return folder, run_tasks(
        folder / "job", {name: launch_tasks for name, launch_tasks in tasks.items() if launch_tasks}
    )


def rewrite(reader: Reader, folder: Path, model: MegatronModel) -> Path:
    with Output(folder) as output:
        writer = MegatronCoreWriter(output, reader.entries, model, reader.iteration, reader.optimizer)
        for key in reader.entries:
            writer.write(key, reader.read(key))
        writer.finish()
    return folder


def make_model(case: Case, reader: MegatronCoreReader) -> MegatronModel:
    sizes = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": case.ep}
    return MegatronModel({**reader.arguments, **sizes}, case.gated)


def test_training_resumes_from_rewritten_checkpoint(trained, hf, tmp_path):
    folder, before = trained
    tasks: dict[str, list[dict]] = {name: [] for name in LAYOUTS}
    for case in CASES:
        source = MegatronCoreReader(folder / case.family)
        assert (source.iteration, source.optimizer_unsupported_reason) == (2, None)
        assert source.optimizer is not None
        assert source.optimizer.step == 2
        assert {key.kind for key in source.entries} == {WEIGHT, MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ}
        assert source.arguments["num_layers"] == make_model(case, source).num_layers
        target = rewrite(source, tmp_path / case.family, make_model(case, source))
        assert (target / "latest_checkpointed_iteration.txt").read_text() == "2"
        again = MegatronCoreReader(target)
        assert again.path == target / "iter_0000002"
        assert list(again.entries) == list(source.entries)
        for key, entry in source.entries.items():
            assert again.entries[key] == entry
            assert torch.equal(again.read(key).view(torch.uint8), source.read(key).view(torch.uint8)), key
        stacked = any(re.match(r"decoder\.layers\.self", name) for name in StoreReader(again.path).entries)
        assert stacked == any(re.match(r"decoder\.layers\.self", name) for name in StoreReader(source.path).entries)
        more = {"load": str(again.path), "load_optimizer": True, "first_step": 2, "steps": 1, "resumed_steps": 0}
        tasks[case.second].append(task("train_save", case, hf, **more))
    after = run_tasks(tmp_path / "job", {name: item for name, item in tasks.items() if item})
    for case in CASES:
        (expected,), (item,) = before[case.family]["resumed"], after[case.family]["steps"]
        assert item["loss"] == pytest.approx(expected["loss"], rel=2e-6), case
        assert item["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5), case


def test_per_layer_keys_and_unsupported_optimizer_state(trained):
    folder, _ = trained
    reader = MegatronCoreReader(folder / "per_layer")
    assert reader.optimizer is None
    assert reader.optimizer_unsupported_reason is None
    assert reader.entries.keys() == {key for key in MegatronCoreReader(folder / "llama").entries if key.kind == WEIGHT}
    local = MegatronCoreReader(folder / "dp_reshardable")
    assert local.optimizer is None
    assert "dp_reshardable" in str(local.optimizer_unsupported_reason)
    assert "--dist-ckpt-optim-fully-reshardable" in str(local.optimizer_unsupported_reason)
    assert {key.kind for key in local.entries} == {WEIGHT}


def test_single_layer_reads_are_bounded(trained, monkeypatch):
    from hf_megatron.core.io.random_access_file import DataFile

    folder, _ = trained
    reader = MegatronCoreReader(folder / "llama")
    count = 0
    read_into = DataFile.read_into

    def count_bytes(file, buffer, offset):
        nonlocal count
        count += len(buffer)
        read_into(file, buffer, offset)

    monkeypatch.setattr(DataFile, "read_into", count_bytes)
    for key in (
        Key(WEIGHT, "decoder.layers.1.mlp.linear_fc1.weight"),
        Key(EXP_AVG, "decoder.layers.0.mlp.linear_fc2.weight"),
    ):
        count = 0
        assert reader.read(key).nbytes <= count < reader.entries[key].nbytes + 8000
