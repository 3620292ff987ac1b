"""Tests of `torch_dist` files: written contents, rejected files, and layouts that megatron-core rarely writes."""

import argparse
import os
import pickle
from pathlib import Path

import pytest
import torch
import transformers

from hf_megatron import CheckpointError
from hf_megatron.conversion.dcp.store_reader import StoreReader
from hf_megatron.conversion.dcp.store_writer import StoreWriter
from hf_megatron.conversion.interfaces import (
    EXP_AVG,
    EXP_AVG_SQ,
    MAIN_WEIGHT,
    WEIGHT,
    Key,
    MegatronModel,
    OptimizerState,
)
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.conversion.megatron_core.writer import MegatronCoreWriter
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.safetensors import TensorMeta

MODEL = MegatronModel({"num_layers": 2}, gated=True)


def make_weights(dtype=torch.bfloat16) -> dict[Key, torch.Tensor]:
    shapes = {"embedding.word_embeddings.weight": (32, 8), "decoder.final_layernorm.weight": (8,)}
    for layer in range(2):
        shapes[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = (16, 8)
        shapes[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"] = (4, 12, 8)
        shapes[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc2.weight"] = (4, 8, 6)
    torch.manual_seed(0)
    return {Key(WEIGHT, name): torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[Key, torch.Tensor], model=MODEL, iteration=None, optimizer=None) -> Path:
    with Output(folder) as output:
        plan = {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}
        writer = MegatronCoreWriter(output, plan, model, iteration, optimizer)
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()
    return folder


def test_weights_only_checkpoint_is_release(tmp_path):
    tensors = make_weights()
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
    # Both copies of the common state are equal.
    (folder / "release" / "common.pt").unlink()
    assert MegatronCoreReader(folder).arguments == reader.arguments


def test_heterogeneous_layers_have_separate_keys(tmp_path):
    tensors = make_weights()
    frequency = MegatronModel({"num_layers": 2, "moe_layer_freq": [1, 1]}, gated=True)
    tall = dict(tensors)
    tall[Key(WEIGHT, "decoder.layers.1.self_attention.linear_qkv.weight")] = torch.randn(20, 8).bfloat16()
    for name, layer_tensors, model in (("a", tensors, frequency), ("b", tall, MODEL)):
        folder = write(tmp_path / name, layer_tensors, model)
        store = StoreReader(folder / "release")
        assert "decoder.layers.1.self_attention.linear_qkv._extra_state/shard_0_1" in store.objects
        assert "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_3_4" in store.objects
        assert store.read_object("common_state/shard_0_1")[0]["content_metadata"]["non_homogeneous_layers"]
        reader = MegatronCoreReader(folder)
        for key, tensor in layer_tensors.items():
            assert torch.equal(reader.read(key), tensor)


@pytest.mark.parametrize("kind", [WEIGHT, EXP_AVG])
def test_separate_halves_and_experts_are_merged(tmp_path, kind):
    """Covers `singleton_local_shards` (transformer/mlp.py, transformer/moe/experts.py)."""
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
        assert "shape of its weight" in str(reader.optimizer_unsupported_reason)
        return
    assert torch.equal(reader.read(Key(WEIGHT, "decoder.layers.0.mlp.linear_fc1.weight")), torch.cat([gate, up]))
    assert torch.equal(reader.read(Key(WEIGHT, "decoder.layers.1.mlp.linear_fc1.bias")), bias.flatten())
    fc1 = reader.read(Key(WEIGHT, "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"))
    assert torch.equal(fc1, experts.flatten(1, 2))


def test_mismatched_plans_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="3 layers"):
        write(tmp_path / "a", make_weights(), MegatronModel({"num_layers": 3}, gated=True))
    with pytest.raises(CheckpointError, match="argument activation"):
        write(
            tmp_path / "b",
            make_weights(),
            MegatronModel({"num_layers": 2, "activation": torch.nn.functional.silu}, True),
        )
    assert not os.listdir(tmp_path)


def test_torch_param_groups_are_converted(tmp_path):
    tensors = make_weights(torch.float32)
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


def test_damaged_and_hostile_files_are_rejected(tmp_path):
    folder = write(tmp_path / "out", make_weights())

    def assert_rejected(*needles: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            reader = MegatronCoreReader(folder)
            for key in reader.entries:
                reader.read(key)
        for needle in needles:
            assert needle in str(caught.value), caught.value

    release, tracker = folder / "release", folder / "latest_checkpointed_iteration.txt"
    for text in ("../elsewhere", "", "-1", "release/../..", "1" * 50):
        tracker.write_text(text)
        assert_rejected(str(tracker))
    tracker.write_text("3")
    assert_rejected("iter_0000003")
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
        assert_rejected(needle)
    (release / "metadata.json").unlink()
    assert_rejected("checkpoint_inspector.py")
    (release / "metadata.json").write_text(config)

    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    common = (release / "common.pt").read_bytes()
    for content in ({"args": Bomb()}, [Bomb()], {"optimizer": {0: Bomb()}}, {"args": transformers.LlamaConfig()}):
        torch.save(content, release / "common.pt")
        assert_rejected(str(release / "common.pt"), "transformers" if "Llama" in repr(content) else "system")
    torch.save([1], release / "common.pt")
    assert_rejected("common state")
    for end in (0, 100, len(common) - 30):
        (release / "common.pt").write_bytes(common[:end])
        assert_rejected(str(release / "common.pt"))
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
