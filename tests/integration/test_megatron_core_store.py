"""`torch_dist` against real megatron-core: its checkpoints are read, and it goes on from those that are written."""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from hf_megatron.conversion.megatron_core import MegatronCoreReader
from hf_megatron.conversion.megatron_core_writer import MegatronCoreWriter
from hf_megatron.conversion.output import Output
from hf_megatron.conversion.tensors import (
    EXP_AVG,
    EXP_AVG_SQ,
    MAIN_WEIGHT,
    WEIGHT,
    Entry,
    Key,
    MegatronModel,
    OptimizerState,
    Reader,
)
from hf_megatron.conversion.torch_store import StoreReader
from hf_megatron.conversion.torch_store_writer import StoreWriter

from hf_megatron import CheckpointError
from tests.twins import twin

ROOT = Path(__file__).parents[2]
PADDED = 256
SEQUENCES = torch.randint(0, 250, (3, 4, 16), generator=torch.Generator().manual_seed(0)).tolist()


@dataclass(frozen=True)
class Case:
    """A family, the layout that writes, and the layout that goes on from what was converted."""

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


def run(folder: Path, tasks: dict[str, list[dict]]) -> dict[str, dict]:
    """Results by name of the task; every task has to succeed."""
    folder.mkdir()
    launches = [{"name": name, "layout": LAYOUTS[name], "tasks": found} for name, found in tasks.items()]
    (folder / "job.json").write_text(json.dumps({"out": str(folder / "out"), "launches": launches}))
    command = [sys.executable, "-m", "tests.megatron_peer.tasks", str(folder / "job.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    results = folder / "out" / "results.json"
    assert results.is_file(), done.stderr[-3000:]
    found = [task for launch in json.loads(results.read_text())["launches"] for task in launch["tasks"]]
    assert not [(task["name"], task["error"]) for task in found if not task["ok"]]
    return {task["name"]: task for task in found}


def task(kind: str, case: Case, hf: Path, name: str = "", **more) -> dict:
    named = {"task": kind, "name": f"{case.family}{name}", "hf": str(hf / case.family), "padded_vocab": PADDED}
    return {**named, "ids": SEQUENCES, **more}


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for case in CASES:
        twin(case.family).config.save_pretrained(folder / case.family)
    return folder


@pytest.fixture(scope="module")
def trained(hf, tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """Two steps of each case are on disk, of the third the loss is known."""
    folder = tmp_path_factory.mktemp("trained")
    tasks: dict[str, list[dict]] = {name: [] for name in LAYOUTS}
    for case in CASES:
        tasks[case.first].append(task("train_save", case, hf, dir=str(folder / case.family), steps=2))
    llama = CASES[0]
    other = {"steps": 1, "resumed_steps": 0, "sharding": "dp_reshardable"}
    tasks["tp1"].append(task("train_save", llama, hf, "-local", dir=str(folder / "dp_reshardable"), **other))
    apart = {"dir": str(folder / "per_layer"), "non_homogeneous": True}
    tasks["tp1"].append({**task("save", llama, hf, "-layers", **apart), "ids": SEQUENCES[0]})
    return folder, run(folder / "job", {name: found for name, found in tasks.items() if found})


def rewrite(reader: Reader, folder: Path, model: MegatronModel) -> Path:
    with Output(folder) as output:
        writer = MegatronCoreWriter(output, reader.entries, model, reader.iteration, reader.optimizer)
        for key in reader.entries:
            writer.write(key, reader.read(key))
        writer.finish()
    return folder


def model_of(case: Case, reader: MegatronCoreReader) -> MegatronModel:
    sizes = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": case.ep}
    return MegatronModel({**reader.arguments, **sizes}, case.gated)


def test_training_goes_on_from_what_was_written(trained, hf, tmp_path):
    folder, before = trained
    tasks: dict[str, list[dict]] = {name: [] for name in LAYOUTS}
    for case in CASES:
        source = MegatronCoreReader(folder / case.family)
        assert (source.iteration, source.optimizer_refusal) == (2, None)
        assert source.optimizer is not None
        assert source.optimizer.step == 2
        assert {key.kind for key in source.entries} == {WEIGHT, MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ}
        assert source.arguments["num_layers"] == model_of(case, source).num_layers
        target = rewrite(source, tmp_path / case.family, model_of(case, source))
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
    after = run(tmp_path / "job", {name: found for name, found in tasks.items() if found})
    for case in CASES:
        (expected,), (found,) = before[case.family]["resumed"], after[case.family]["steps"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-6), case
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5), case


def test_per_layer_keys_and_a_state_that_is_not_read(trained):
    folder, _ = trained
    reader = MegatronCoreReader(folder / "per_layer")
    assert reader.optimizer is None
    assert reader.optimizer_refusal is None
    assert reader.entries.keys() == {key for key in MegatronCoreReader(folder / "llama").entries if key.kind == WEIGHT}
    local = MegatronCoreReader(folder / "dp_reshardable")
    assert local.optimizer is None
    assert "dp_reshardable" in str(local.optimizer_refusal)
    assert "--dist-ckpt-optim-fully-reshardable" in str(local.optimizer_refusal)
    assert {key.kind for key in local.entries} == {WEIGHT}


def test_one_layer_is_read_at_a_time(trained, monkeypatch):
    from hf_megatron.conversion import data_file

    folder, _ = trained
    reader = MegatronCoreReader(folder / "llama")
    count = 0
    read_at = data_file.read_at

    def counting(descriptor, buffer, offset, path):
        nonlocal count
        count += len(buffer)
        read_at(descriptor, buffer, offset, path)

    monkeypatch.setattr(data_file, "read_at", counting)
    for key in (
        Key(WEIGHT, "decoder.layers.1.mlp.linear_fc1.weight"),
        Key(EXP_AVG, "decoder.layers.0.mlp.linear_fc2.weight"),
    ):
        count = 0
        assert reader.read(key).nbytes <= count < reader.entries[key].nbytes + 8000


# --- without megatron-core ------------------------------------------------------------------------------------------

MODEL = MegatronModel({"num_layers": 2}, gated=True)


def weights(dtype=torch.bfloat16) -> dict[Key, torch.Tensor]:
    shapes = {"embedding.word_embeddings.weight": (32, 8), "decoder.final_layernorm.weight": (8,)}
    for layer in range(2):
        shapes[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = (16, 8)
        shapes[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"] = (4, 12, 8)
        shapes[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc2.weight"] = (4, 8, 6)
    torch.manual_seed(0)
    return {Key(WEIGHT, name): torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[Key, torch.Tensor], model=MODEL, iteration=None, optimizer=None) -> Path:
    with Output(folder) as output:
        plan = {key: Entry.of(tensor) for key, tensor in tensors.items()}
        writer = MegatronCoreWriter(output, plan, model, iteration, optimizer)
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()
    return folder


def test_weights_alone_are_a_release(tmp_path):
    tensors = weights()
    folder = write(tmp_path / "out", tensors)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(os.listdir(folder / "release")) == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    reader = MegatronCoreReader(folder)
    assert (reader.iteration, reader.optimizer, reader.arguments["padded_vocab_size"]) == (None, None, 32)
    for key, tensor in tensors.items():
        assert torch.equal(reader.read(key), tensor)
    store = StoreReader(folder / "release")
    assert store.entries["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (2, 4, 12, 8)
    expected = {
        "common_state/shard_0_1",
        "decoder.final_layernorm._extra_state/shard_0_1",
        "decoder.layers.self_attention.core_attention._extra_state/shard_1_2",
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2",
        "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4",
    }
    assert expected <= store.objects
    assert store.read_object("decoder.final_layernorm._extra_state/shard_0_1") == [None]
    common = torch.load(folder / "release" / "common.pt", weights_only=False)
    assert isinstance(common["args"], argparse.Namespace)
    # Both places of the common state say the same.
    (folder / "release" / "common.pt").unlink()
    assert MegatronCoreReader(folder).arguments == reader.arguments


def test_layers_that_differ_have_keys_of_their_own(tmp_path):
    tensors = weights()
    frequency = MegatronModel({"num_layers": 2, "moe_layer_freq": [1, 1]}, gated=True)
    tall = dict(tensors)
    tall[Key(WEIGHT, "decoder.layers.1.self_attention.linear_qkv.weight")] = torch.randn(20, 8).bfloat16()
    for name, found, model in (("a", tensors, frequency), ("b", tall, MODEL)):
        folder = write(tmp_path / name, found, model)
        store = StoreReader(folder / "release")
        assert "decoder.layers.1.self_attention.linear_qkv._extra_state/shard_0_1" in store.objects
        assert "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_3_4" in store.objects
        assert store.read_object("common_state/shard_0_1")[0]["content_metadata"]["non_homogeneous_layers"]
        reader = MegatronCoreReader(folder)
        for key, tensor in found.items():
            assert torch.equal(reader.read(key), tensor)


@pytest.mark.parametrize("kind", [WEIGHT, EXP_AVG])
def test_halves_and_experts_of_their_own(tmp_path, kind):
    """`singleton_local_shards` (transformer/mlp.py, transformer/moe/experts.py)."""
    gate, up, bias = torch.randn(6, 8), torch.randn(6, 8), torch.randn(2, 6)
    experts = torch.randn(3, 2, 5, 8)
    with Output(tmp_path / "s") as output:
        store = StoreWriter(output)
        prefix = "" if kind == WEIGHT else "optimizer.state.exp_avg."
        layer = prefix + "decoder.layers.0.mlp."
        for name, tensor in (("linear_fc1.weight_w", gate), ("linear_fc1.weight_v", up)):
            store.write_chunk(layer + name, tensor.shape, (0, 0), tensor)
        for half, letter in enumerate("wv"):
            store.write_chunk(f"{prefix}decoder.layers.1.mlp.linear_fc1.bias_{letter}", (6,), (0,), bias[half])
        for expert in range(3):
            for half, letter in enumerate("wv"):
                name = f"{prefix}decoder.layers.1.mlp.experts.experts.{expert}.linear_fc1.weight_{letter}"
                store.write_chunk(name, (5, 8), (0, 0), experts[expert, half])
        store.finish()
    folder = tmp_path / "s"
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 3}, folder / "common.pt")
    reader = MegatronCoreReader(folder)
    if kind != WEIGHT:
        assert "shape of its weight" in str(reader.optimizer_refusal)
        return
    assert torch.equal(reader.read(Key(WEIGHT, "decoder.layers.0.mlp.linear_fc1.weight")), torch.cat([gate, up]))
    assert torch.equal(reader.read(Key(WEIGHT, "decoder.layers.1.mlp.linear_fc1.bias")), bias.flatten())
    found = reader.read(Key(WEIGHT, "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"))
    assert torch.equal(found, experts.flatten(1, 2))


def test_groups_of_other_optimizers(tmp_path):
    tensors = weights(torch.float32)
    for key in list(tensors):
        tensors |= {Key(kind, key.name): torch.rand_like(tensors[key]) for kind in (MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ)}
    torch_groups = ({"lr": 2e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}, {"lr": 2e-4, "weight_decay": 0.0})
    folder = write(tmp_path / "out", tensors, optimizer=OptimizerState(7, torch_groups))
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "7"
    reader = MegatronCoreReader(folder)
    assert reader.optimizer is not None
    decayed, other = reader.optimizer.hyperparameters
    assert (reader.optimizer.step, reader.iteration) == (7, 7)
    assert [group["wd_mult"] for group in (decayed, other)] == [1.0, 0.0]
    assert [group["weight_decay"] for group in (decayed, other)] == [0.1, 0.0]
    assert (decayed["lr"], other["betas"]) == (2e-4, (0.9, 0.95))
    del tensors[Key(EXP_AVG, "decoder.final_layernorm.weight")]
    with pytest.raises(CheckpointError, match="final_layernorm"):
        write(tmp_path / "half", tensors, optimizer=OptimizerState(7))
    with pytest.raises(CheckpointError, match="exp_avg"):
        write(tmp_path / "none", {key: tensor for key, tensor in tensors.items() if "final" not in key.name})
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_refused(tmp_path):
    folder = write(tmp_path / "out", weights())

    def refused(*needles: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            reader = MegatronCoreReader(folder)
            for key in reader.entries:
                reader.read(key)
        for needle in needles:
            assert needle in str(caught.value), caught.value

    release, tracker = folder / "release", folder / "latest_checkpointed_iteration.txt"
    for text in ("../elsewhere", "", "-1", "release/../..", "1" * 50):
        tracker.write_text(text)
        refused(str(tracker))
    tracker.write_text("3")
    refused("iter_0000003")
    tracker.write_text("release")
    config = (release / "metadata.json").read_text()
    for text, needle in (
        ("[]", "metadata.json"),
        ("{", "metadata.json"),
        ('{"sharded_backend": "zarr", "sharded_backend_version": 1}', "--ckpt-format torch_dist"),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}', "torch_dist 2"),
        ('{"sharded_backend": "fsdp_dtensor"}', "checkpoint_inspector.py"),
    ):
        (release / "metadata.json").write_text(text)
        refused(needle)
    (release / "metadata.json").unlink()
    refused("checkpoint_inspector.py")
    (release / "metadata.json").write_text(config)

    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    common = (release / "common.pt").read_bytes()
    for content in ({"args": Bomb()}, [Bomb()], {"optimizer": {0: Bomb()}}, {"args": transformers.LlamaConfig()}):
        torch.save(content, release / "common.pt")
        refused(str(release / "common.pt"), "transformers" if "Llama" in repr(content) else "system")
    torch.save([1], release / "common.pt")
    refused("common state")
    for end in (0, 100, len(common) - 30):
        (release / "common.pt").write_bytes(common[:end])
        refused(str(release / "common.pt"))
    (release / "common.pt").write_bytes(common)
    path = release / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    name = "decoder.layers.self_attention.linear_qkv.weight"
    metadata.state_dict_metadata[name.replace("layers.", "layers.0.")] = metadata.state_dict_metadata.pop(name)
    moved = {index: info for index, info in metadata.storage_data.items() if index.fqn == name}
    for index, info in moved.items():
        object.__setattr__(index, "fqn", name.replace("layers.", "layers.0."))
        metadata.storage_data = {**metadata.storage_data, index: info}
    path.write_bytes(pickle.dumps(metadata))
    reader = MegatronCoreReader(folder)
    assert reader.entries[Key(WEIGHT, "decoder.layers.0.self_attention.linear_qkv.weight")].shape == (2, 16, 8)
    assert not canary.exists()
