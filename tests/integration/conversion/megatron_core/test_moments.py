"""Tests of optimizer moments: mixer blocks with separate torch_dist names, heads with two names, and damaged blocks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_megatron import CheckpointError
from hf_megatron.conversion import convert
from hf_megatron.conversion.families import get_family
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
from tests.helpers.tiny_models import build_tiny_model, make_config


def write(folder: Path, tensors: dict[Key, torch.Tensor], model: MegatronModel, state: OptimizerState | None) -> None:
    plan = {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}
    with Output(folder) as output:
        writer = MegatronCoreWriter(output, plan, model, None, state)
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()


def read(folder: Path) -> dict[Key, torch.Tensor]:
    with MegatronCoreReader(folder) as reader:
        return {key: reader.read(key) for key in reader.entries}


@pytest.mark.parametrize("case", ["nemotron_h", "mamba2_tied", "t5"])
def test_moments_round_trip(tmp_path, case):
    build_tiny_model(case).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain", "megatron_core")
    tensors = read(tmp_path / "plain")
    for factor, kind in enumerate((MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ), 1):
        tensors |= {
            # megatron-core stores one set of moments for a parameter with two names.
            Key(kind, key.name): tensor * factor
            for key, tensor in tensors.items()
            if key.kind == WEIGHT and key.name != "lm_head.output_layer.weight"
        }
    write(tmp_path / "trained", tensors, get_family(make_config(case)).model(make_config(case)), OptimizerState(7))
    convert(tmp_path / "trained", tmp_path / "sharded", "sharded", config=str(tmp_path / "hf"))
    convert(tmp_path / "sharded", tmp_path / "again", "megatron_core")
    with MegatronCoreReader(tmp_path / "again") as reader:
        assert reader.optimizer is not None and reader.optimizer.step == 7
        assert reader.entries.keys() >= tensors.keys()
        assert all(torch.equal(reader.read(key), tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (
            {"z": 128, "x": 128, "B": 32, "C": 32, "rest": 8},
            "decoder.layers.0.mixer.in_proj.weight is incomplete",
        ),
        ({"z": 128, "x": 128, "B": 32, "C": 32, "dt": 8, "rest": 8}, "tensors have no counterpart"),
    ],
)
def test_missing_or_extra_block_is_rejected(tmp_path, blocks, said):
    build_tiny_model("mamba2").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain", "megatron_core")
    tensors, name = read(tmp_path / "plain"), "mixer.in_proj.weight"
    model = get_family(make_config("mamba2")).model(make_config("mamba2"))
    tensors = {
        key: torch.cat([tensor, tensor])[: sum(blocks.values())] if key.name.endswith(name) else tensor
        for key, tensor in tensors.items()
    }
    write(tmp_path / "damaged", tensors, replace(model, blocks={**model.blocks, name: blocks}), None)
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "damaged", tmp_path / "back", "hf", config=str(tmp_path / "hf"))


def test_mismatched_head_copies_are_rejected(tmp_path):
    build_tiny_model("t5").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain", "megatron_core")
    tensors = read(tmp_path / "plain")
    tensors[Key(WEIGHT, "lm_head.output_layer.weight")] += 1
    write(tmp_path / "damaged", tensors, get_family(make_config("t5")).model(make_config("t5")), None)
    with pytest.raises(CheckpointError, match=r"lm_head\.output_layer\.weight: 2 copies .* differ"):
        convert(tmp_path / "damaged", tmp_path / "back", "hf", config=str(tmp_path / "hf"))
