"""Tests of Mamba2 and Nemotron-H conversion: MambaModel matches transformers' logits, and its saves convert back.

Its mixer runs on a torch definition of mamba_ssm's kernels (`tests/megatron_peer/state_space.py`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from hf_megatron import CheckpointError
from hf_megatron.conversion import TargetOptions, convert
from tests.helpers.tiny_models import VOCABULARY, build_tiny_model

ROOT = Path(__file__).parents[4]
# Block sizes in the first layer of the tiny Nemotron-H model.
BLOCKS = {"z": 128, "x": 128, "B": 32, "C": 32, "dt": 8}


@pytest.mark.parametrize("layout", ["1", "2", "1x2"])
@pytest.mark.parametrize("case", ["nemotron_h", "mamba2_tied", "mamba2"])
def test_logits_match_megatron_core(tmp_path, case, layout):
    """Covers tensor-parallel ranks, with and without pipeline stages."""
    tp, pp = (int(layout[0]), int(layout[-1]) if "x" in layout else 1)
    model, hf = build_tiny_model(case), tmp_path / "hf"
    model.save_pretrained(hf)
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, hf / "inputs.safetensors")
    convert(hf, tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=tp))
    convert(hf, tmp_path / "legacy", "megatron_legacy", options=TargetOptions(tp, pp, local_names=True))
    folders = [str(tmp_path / name / "release") for name in ("core", "legacy")]
    command = [sys.executable, "-m", "tests.megatron_peer.mamba", str(hf), str(tmp_path / "out"), layout, *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    outputs = load_file(tmp_path / "out")
    with torch.no_grad():
        expected = model(ids).logits
    for index in range(len(folders)):
        logits = outputs[str(index)][..., :VOCABULARY]
        assert (logits - expected).abs().max() < 1e-6 * max(1.0, float(expected.abs().max()))
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    before = load_file(hf / "model.safetensors")
    for form in ("core", "legacy"):
        convert(tmp_path / f"out-{form}", tmp_path / f"{form}-hf", "hf", config=str(hf))
        after = load_file(tmp_path / f"{form}-hf" / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hold_shard_of_each_block(tmp_path, tp):
    model = build_tiny_model("nemotron_h")
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", options=TargetOptions(tp_size=tp))
    mixer = model.model.layers[0].mixer
    tensors = {"in_proj.weight": mixer.in_proj.weight, "conv1d.weight": mixer.conv1d.weight}
    for rank in range(tp):
        file = tmp_path / "legacy" / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)["model"]
        for name, unsharded in tensors.items():
            sizes = list(BLOCKS.values()) if name.startswith("in_proj") else [BLOCKS[block] for block in "xBC"]
            shard = state[f"decoder.layers.0.mixer.{name}"]
            assert torch.equal(shard, torch.cat([block.chunk(tp)[rank] for block in unsharded.split(sizes)]))
            # A chunk across blocks would have the same shape, but other values.
            assert shard.shape == unsharded.chunk(tp)[rank].shape and not torch.equal(shard, unsharded.chunk(tp)[rank])


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3), (1, 6), (2, 1, 2), (2, 2, 4)])
def test_rank_files_round_trip_bit_equal(tmp_path, sizes):
    build_tiny_model("nemotron_h").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", options=TargetOptions(*sizes))
    convert(tmp_path / "legacy", tmp_path / "back", "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_each_block_has_stored_name(tmp_path):
    build_tiny_model("nemotron_h").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "core", "megatron_core")
    stored = FileSystemReader(tmp_path / "core" / "release").read_metadata().state_dict_metadata
    for layer in (0, 4):
        prefix = f"decoder.layers.{layer}.mixer."
        for block, size in BLOCKS.items():
            assert tuple(stored[f"{prefix}in_proj.weight.{block}"].size) == (size, 64)
            assert (f"{prefix}conv1d.bias.{block}" in stored) is (block in "xBC")
        assert f"{prefix}in_proj.weight" not in stored


def test_indivisible_groups_are_rejected(tmp_path):
    build_tiny_model("mamba2").save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="mamba_num_groups 4 is not divisible by tp_size 8. Valid sizes: 1, 2, 4"):
        convert(tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", options=TargetOptions(tp_size=8))
