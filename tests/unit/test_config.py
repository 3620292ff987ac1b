"""Tests of MegatronConfig: accepted inputs, and errors with field, value and valid choices."""

import copy

import pytest

from hf_megatron import ConfigError, MegatronConfig, config_from_environment
from hf_megatron.config import validate_world_size


def test_accepts_config_dict_and_yaml(tmp_path):
    file = tmp_path / "megatron.yaml"
    file.write_text("tp_size: 2\nsequence_parallel: true\n")
    expected = MegatronConfig(tp_size=2, sequence_parallel=True)
    assert MegatronConfig.coerce(expected) is expected
    assert MegatronConfig.coerce({"tp_size": 2, "sequence_parallel": True}) == expected
    assert MegatronConfig.coerce(str(file)) == MegatronConfig.coerce(file) == expected
    assert copy.deepcopy(expected) == expected


def test_megatron_arguments():
    expected = MegatronConfig(tp_size=4, sequence_parallel=True)
    names = {"tensor_model_parallel_size": 4, "--sequence-parallel": True, "--context-parallel-size": 1}
    assert MegatronConfig.from_megatron_args(names) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tp_size": 0}, ["tp_size", "0", "1 or more"]),
        ({"tp_size": "2"}, ["tp_size", "'2'"]),
        ({"tp_size": True}, ["tp_size", "True"]),
        ({"sequence_parallel": 1, "tp_size": 2}, ["sequence_parallel", "True or False"]),
        ({"sequence_parallel": True}, ["sequence_parallel", "tp_size"]),
        ({"loss_chunk_size": 0}, ["loss_chunk_size", "0"]),
        ({"timeout": -1}, ["timeout", "-1"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"tpsize": 2}, ["tpsize", "2", "tp_size"]),
    ],
)
def test_bad_values_are_named(values, words):
    with pytest.raises(ConfigError) as error:
        MegatronConfig.from_dict(values)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("value", ["even", [2, 0], [1.5, 2], (), 3])
def test_pipeline_partition(value):
    with pytest.raises(ConfigError, match="pipeline_partition"):
        MegatronConfig(pp_size=2, pipeline_partition=value)
    config = MegatronConfig(pp_size=2, pipeline_partition=[5, 3])
    assert config.pipeline_partition == (5, 3) and MegatronConfig.from_dict(config.to_dict()) == config


def test_unknown_field_error_has_a_suggestion():
    for create in (MegatronConfig.from_dict, lambda fields: MegatronConfig(**fields)):
        with pytest.raises(ConfigError, match=r"no field 'tpsize' \(value 2\); did you mean .*tp_size"):
            create({"tpsize": 2})
    with pytest.raises(ConfigError, match="accelerate launch --config_file"):
        MegatronConfig.from_dict({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MEGATRON_LM"})
    with pytest.raises(ConfigError, match="takes a mapping"):
        MegatronConfig.from_megatron_args(["--tensor-model-parallel-size", "2"])


def test_unknown_megatron_argument_and_type():
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        MegatronConfig.from_megatron_args({"tensor-model-parallel": 2})
    with pytest.raises(ConfigError, match="expected a MegatronConfig"):
        MegatronConfig.coerce(3)


def test_too_small_world_size_prints_launch_command():
    with pytest.raises(ConfigError) as error:
        validate_world_size(MegatronConfig(tp_size=4), 2)
    assert "torchrun --nproc_per_node 4" in str(error.value) and "MEGATRON_LM" in str(error.value)


def test_world_sizes():
    assert validate_world_size(MegatronConfig(tp_size=2), 2) == 1
    with pytest.raises(ConfigError, match="does not divide"):
        validate_world_size(MegatronConfig(tp_size=2), 3)
    assert validate_world_size(MegatronConfig(tp_size=2), 4) == 2
    with pytest.raises(ConfigError, match="dp_size = 4"):
        validate_world_size(MegatronConfig(tp_size=2, dp_size=4), 4)
    with pytest.raises(ConfigError, match="dp_replicate_size = 3"):
        validate_world_size(MegatronConfig(dp_replicate_size=3), 4)


@pytest.mark.parametrize("values", [{"zero_stage": 4}, {"zero_stage": True}, {"recompute": "some"}, {"bucket_size": 0}])
def test_data_parallel_fields_are_checked(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        MegatronConfig(**values)


def test_launch_environment():
    block = {"HF_MEGATRON_LAUNCH": "true", "MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_SEQUENCE_PARALLELISM": "true"}
    assert config_from_environment(block) == MegatronConfig(tp_size=2, sequence_parallel=True)
    assert config_from_environment({}) == MegatronConfig()
    assert config_from_environment(block | {"MEGATRON_LM_PP_DEGREE": "2"}).pp_size == 2
    with pytest.raises(ConfigError, match="MEGATRON_LM_TP_DEGREE = 'two'"):
        config_from_environment(block | {"MEGATRON_LM_TP_DEGREE": "two"})


def test_configs_from_earlier_versions_are_read():
    earlier = {"frozen": {"reference": {"tp_size": 1}}, "pack_activations": False, "auxiliary_loss": "sequence"}
    earlier |= {"router_z_loss": 0.1, "main_weights_in_fp32": False, "tp_size": 2}
    config = MegatronConfig.from_saved(earlier)
    assert (config.tp_size, config.shard_saved_activations, config.router_aux_loss_scope) == (2, False, "sequence")
    assert (config.router_z_loss_coef, config.fp32_main_params) == (0.1, False)
    assert MegatronConfig.from_saved(config.to_dict()) == config
    with pytest.raises(ConfigError, match="no field 'frozen'"):
        MegatronConfig.from_dict(earlier)
