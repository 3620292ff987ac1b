"""Moments of mixers, whose blocks have names of their own in torch_dist, and of a head that has two names."""

import pytest
import torch

from hf_megatron.conversion import convert
from hf_megatron.conversion.families import family_of
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.conversion.megatron_core.writer import MegatronCoreWriter
from hf_megatron.conversion.output import Output
from hf_megatron.conversion.tensors import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, OptimizerState
from hf_megatron.files.safetensors import TensorMeta
from tests.twins import config_of, twin


@pytest.mark.parametrize("case", ["nemotron_h", "mamba2_tied", "t5"])
def test_moments_come_along(tmp_path, case):
    twin(case).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain", "megatron_core")
    with MegatronCoreReader(tmp_path / "plain") as reader:
        tensors = {key: reader.read(key) for key in reader.entries}
    for factor, kind in enumerate((MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ), 1):
        tensors |= {
            # megatron-core keeps one set for a parameter that has two names.
            Key(kind, key.name): tensor * factor
            for key, tensor in tensors.items()
            if key.kind == WEIGHT and key.name != "lm_head.output_layer.weight"
        }
    plan = {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}
    with Output(tmp_path / "trained") as output:
        model = family_of(config_of(case)).model(config_of(case))
        writer = MegatronCoreWriter(output, plan, model, None, OptimizerState(7))
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()
    convert(tmp_path / "trained", tmp_path / "sharded", "sharded", config=str(tmp_path / "hf"))
    convert(tmp_path / "sharded", tmp_path / "again", "megatron_core")
    with MegatronCoreReader(tmp_path / "again") as reader:
        assert reader.optimizer is not None and reader.optimizer.step == 7
        assert reader.entries.keys() >= tensors.keys()
        assert all(torch.equal(reader.read(key), tensor) for key, tensor in tensors.items())
