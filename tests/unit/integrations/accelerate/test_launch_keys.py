"""Tests of accelerate's launcher keys, each honored or rejected by name, and of the HF_MEGATRON_* variables."""

import dataclasses
import re
from pathlib import Path

import accelerate
import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import MegatronLMPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_megatron import ConfigError, MegatronConfig, MegatronPlugin, UnsupportedError, config_from_environment
from hf_megatron.integrations.accelerate.launch_keys import (
    LAUNCH_KEYS,
    PREFIX,
    format_field_variables,
    parse_field_variables,
)
from hf_megatron.integrations.accelerate.plugin import get_plugin_config

LAUNCH_ENVIRONMENT = {"HF_MEGATRON_LAUNCH": "true"}


def block(**keys):
    return LAUNCH_ENVIRONMENT | {PREFIX + name.upper(): str(value) for name, value in keys.items()}


def export_keys(**keys):
    """Returns the environment that `accelerate launch` exports for a `megatron_lm_config` with these keys."""
    parser = launch_command_parser()
    args = parser.parse_args(["--use_megatron_lm", "--num_processes", "2", "--num_machines", "1", "script.py"])
    args.mixed_precision, args.dynamo_backend, args.num_cpu_threads_per_process = "no", "no", 1
    for name, value in keys.items():
        assert hasattr(args, f"megatron_lm_{name}"), f"accelerate has no key {name}"
        setattr(args, f"megatron_lm_{name}", value)
    environment = prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_USE_MEGATRON_LM"] == "true"
    return LAUNCH_ENVIRONMENT | {name: value for name, value in environment.items() if name.startswith(PREFIX)}


def test_table_has_every_exported_launcher_key():
    everything = export_keys(**dict.fromkeys(LAUNCH_KEYS, 1))
    assert {name[len(PREFIX) :].lower() for name in everything if name.startswith(PREFIX)} == set(LAUNCH_KEYS)
    # The source of the launcher and of the plugin contains no other key.
    package = Path(accelerate.__file__).parent / "utils"
    for file in ("launch.py", "dataclasses.py"):
        text = (package / file).read_text(encoding="utf-8")
        assert set(re.findall(r'\[?prefix \+ "([A-Z0-9_]+)"', text[text.index(f'"{PREFIX}"') :])) >= {"TP_DEGREE"}
        section = text[text.index(f'prefix = "{PREFIX}"') :]
        section = section[: section.index("OMP_NUM_THREADS") if file == "launch.py" else section.index("DDP_impl")]
        assert {name.lower() for name in re.findall(r'prefix \+ "([A-Z0-9_]+)"', section)} == set(LAUNCH_KEYS)


def test_table_defaults_match_accelerate():
    plugin = MegatronLMPlugin()
    assert {name: getattr(plugin, name) for name in LAUNCH_KEYS} == {name: k.default for name, k in LAUNCH_KEYS.items()}
    assert get_plugin_config(plugin) == MegatronConfig()


def test_default_launcher_environment_is_accepted():
    assert config_from_environment(export_keys()) == MegatronConfig(gradient_clipping=1.0)


def test_accelerate_config_answers_are_honored():
    """Uses the answers that `accelerate config` suggests, with tp_degree 2."""
    environment = export_keys(
        tp_degree=2,
        sequence_parallelism=True,
        pp_degree=1,
        recompute_activations=True,
        use_distributed_optimizer=True,
        gradient_clipping=1.0,
    )
    assert config_from_environment(environment) == MegatronConfig(
        tp_size=2, sequence_parallel=True, recompute="selective", zero_stage=1, gradient_clipping=1.0
    )


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"tp_degree": 2}, {"tp_size": 2}),
        ({"tp_degree": 2, "sequence_parallelism": "True"}, {"tp_size": 2, "sequence_parallel": True}),
        ({"tp_degree": 1, "sequence_parallelism": "true"}, {}),
        ({"pp_degree": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1}, {}),
        ({"context_parallel_size": 4}, {"cp_size": 4}),
        ({"tp_degree": 2, "expert_tensor_parallel_size": 2}, {"tp_size": 2}),
        ({"use_distributed_optimizer": False}, {"zero_stage": 0}),
        ({"use_distributed_optimizer": "true"}, {"zero_stage": 1}),
        ({"optimizer_cpu_offload": True}, {"offload_optimizer": True}),
        ({"recompute_activations": "True"}, {"recompute": "selective"}),
        ({"recompute_activations": "False"}, {}),
        ({"recompute_activations": False, "recompute_granularity": "full"}, {"recompute": "full"}),
        ({"recompute_granularity": "selective"}, {"recompute": "selective"}),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            {"recompute": "full"},
        ),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 0.5}),
        ({"gradient_clipping": 0}, {"gradient_clipping": None}),
        ({"num_micro_batches": 1}, {}),
        ({"pp_degree": 2}, {"pp_size": 2}),
        ({"pp_degree": 2, "num_micro_batches": 4}, {"pp_size": 2, "num_microbatches": 4}),
        ({"pp_degree": 2, "num_micro_batches": 1}, {"pp_size": 2, "num_microbatches": 1}),
        ({"attention_backend": "true", "attention_softmax_in_fp32": "true", "calculate_per_token_loss": "true"}, {}),
        ({"use_custom_fsdp": False, "no_load_optim": False, "no_save_optim": False, "eod_mask_loss": False}, {}),
        ({"use_precision_aware_optimizer": False, "overlap_cpu_optimizer_d2h_h2d": False}, {}),
        ({"num_micro_batches": None}, {}),
        ({"expert_model_parallel_size": 4}, {"ep_size": 4}),
        ({"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, {"ep_size": 4, "etp_size": 1}),
        (
            {"tp_degree": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
            {"tp_size": 2, "ep_size": 4, "etp_size": 2},
        ),
    ],
    ids=str,
)
def test_supported_keys_are_honored(keys, fields):
    assert config_from_environment(block(**keys)) == MegatronConfig(**fields)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_tensor_parallel_size", 2, ["valid: 1", "tp_degree"]),
        ("recompute_method", "block", ["valid: uniform"]),
        ("recompute_num_layers", 4, ["valid: 1"]),
        ("num_micro_batches", 4, ["valid: 1", "gradient_accumulation_steps"]),
        ("decoder_last_pipeline_num_layers", 3, ["HF_MEGATRON_PIPELINE_PARTITION"]),
        ("use_custom_fsdp", True, ["valid: false", "HF_MEGATRON_ZERO_STAGE"]),
        ("no_load_optim", True, ["valid: false"]),
        ("no_save_optim", True, ["valid: false"]),
        ("use_precision_aware_optimizer", True, ["valid: false"]),
        ("overlap_cpu_optimizer_d2h_h2d", True, ["valid: false"]),
        ("eod_mask_loss", True, ["valid: false", "-100"]),
        ("calculate_per_token_loss", False, ["valid: true"]),
        ("attention_backend", "flash", ["valid: true", "attn_implementation"]),
        ("attention_softmax_in_fp32", False, ["valid: true"]),
        ("attention_dropout", 0.1, ["leave it out", "model's config"]),
        ("hidden_dropout", 0.0, ["leave it out", "model's config"]),
        ("use_rotary_position_embeddings", True, ["leave it out"]),
    ],
)
def test_unsupported_keys_are_rejected_by_name(key, value, words):
    with pytest.raises(UnsupportedError) as error:
        config_from_environment(block(**{key: value}))
    key_names = () if words[0].endswith("_size") else (f"megatron_lm_{key}", PREFIX + key.upper())
    assert all(word in str(error.value) for word in (*words, *key_names)), error.value


def test_every_key_without_a_field_has_a_rejection_case():
    rejected_keys = {mark[0] for mark in test_unsupported_keys_are_rejected_by_name.pytestmark[0].args[1]}
    assert {name for name, key in LAUNCH_KEYS.items() if key.field is None} <= rejected_keys


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (block(tp_degree="two"), ["MEGATRON_LM_TP_DEGREE = 'two'", "integer"]),
        (block(tp_degree="True"), ["an integer"]),
        (block(sequence_parallelism="maybe"), ["true or false"]),
        (block(gradient_clipping="-1"), ["0 (no clipping) or more"]),
        (block(gradient_clipping="nan"), ["0 (no clipping) or more"]),
        (block(recompute_granularity="some"), ["full or selective"]),
        (block(recompute_activations=True, recompute_granularity="full"), ["contradicts", "recompute"]),
        (block(tp_degre=2), ["MEGATRON_LM_TP_DEGRE", "MEGATRON_LM_TP_DEGREE"]),
        ({"HF_MEGATRON_TPSIZE": "2"}, ["HF_MEGATRON_TPSIZE", "HF_MEGATRON_TP_SIZE"]),
        ({"HF_MEGATRON_TP_SIZE": "two"}, ["HF_MEGATRON_TP_SIZE = 'two'", "integer"]),
        ({"HF_MEGATRON_TP_SIZE": "0"}, ["tp_size", "1 or more"]),
        ({"HF_MEGATRON_SEQUENCE_PARALLEL": "perhaps"}, ["true or false"]),
        ({"HF_MEGATRON_SEQUENCE_PARALLEL": "true"}, ["sequence_parallel", "tp_size"]),
        ({"HF_MEGATRON_PIPELINE_PARTITION": "2,x"}, ["HF_MEGATRON_PIPELINE_PARTITION = 'x'", "an integer"]),
        ({"HF_MEGATRON_TIMEOUT": "soon"}, ["HF_MEGATRON_TIMEOUT", "a number"]),
    ],
    ids=str,
)
def test_unreadable_values_are_named(environment, words):
    with pytest.raises(ConfigError) as error:
        config_from_environment(environment)
    assert all(word in str(error.value) for word in words), error.value


def test_every_field_can_be_set_by_a_variable():
    values = {
        "tp_size": 2,
        "sequence_parallel": True,
        "dp_size": 4,
        "zero_stage": 3,
        "dp_replicate_size": 2,
        "bucket_size": 8,
        "fp32_main_params": False,
        "max_skipped_steps": 3,
        "offload_optimizer": True,
        "recompute": "full",
        "offload_activations": True,
        "gradient_clipping": 0.5,
        "pp_size": 2,
        "num_microbatches": 6,
        "pipeline_schedule": "interleaved_1f1b",
        "virtual_stages": 2,
        "pipeline_partition": (1, 2, 1, 1),
        "cp_size": 4,
        "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": (2, 2),
        "ep_size": 2,
        "etp_size": 1,
        "loss_chunk_size": 64,
        "strict_loading": False,
        "unverified": "allow",
        "seed": -7,
        "timeout": 60.5,
    }
    # Fields without a value here are parsed by their type as well.
    assert set(values) <= {field.name for field in dataclasses.fields(MegatronConfig)}
    environment = {f"HF_MEGATRON_{name.upper()}": str(value) for name, value in values.items()}
    assert config_from_environment(environment) == MegatronConfig(**values)
    for field in dataclasses.fields(MegatronConfig):
        assert config_from_environment({f"HF_MEGATRON_{field.name.upper()}": str(field.default)}) == MegatronConfig()


def test_field_variables_override_launcher_keys():
    environment = block(tp_degree=4, sequence_parallelism=True, use_distributed_optimizer=False)
    environment |= {"HF_MEGATRON_TP_SIZE": "2", "HF_MEGATRON_ZERO_STAGE": "3", "HF_MEGATRON_LAUNCH": "true"}
    assert config_from_environment(environment) == MegatronConfig(tp_size=2, sequence_parallel=True, zero_stage=3)
    environment["HF_MEGATRON_TP_SIZE"] = "1"
    assert config_from_environment(environment) == MegatronConfig(zero_stage=3)
    environment["HF_MEGATRON_GRADIENT_CLIPPING"] = "none"
    assert config_from_environment(environment | {"MEGATRON_LM_GRADIENT_CLIPPING": "1.0"}).gradient_clipping is None


@pytest.mark.parametrize("text", ["2,3", "[2, 3]", "(2, 3)"])
def test_pipeline_partition_variable_is_a_list(text):
    assert config_from_environment({"HF_MEGATRON_PIPELINE_PARTITION": text}).pipeline_partition == (2, 3)


def test_launcher_keys_are_ignored_without_launch():
    environment = {"MEGATRON_LM_TP_DEGREE": "2"}
    assert config_from_environment(environment) == MegatronConfig()
    assert config_from_environment(environment | {"ACCELERATE_USE_MEGATRON_LM": "true"}).tp_size == 2


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1.0"])
def test_invalid_gradient_clipping_is_rejected(value):
    with pytest.raises(ConfigError, match="gradient_clipping"):
        MegatronConfig(gradient_clipping=value)


def test_megatron_lm_plugin_is_read(monkeypatch):
    assert get_plugin_config(MegatronLMPlugin(pp_degree=2, num_micro_batches=4)) == MegatronConfig(
        pp_size=2, num_microbatches=4
    )
    plugin = MegatronLMPlugin(
        tp_degree=2, sequence_parallelism=True, use_distributed_optimizer=True, gradient_clipping=0.5
    )
    expected = MegatronConfig(tp_size=2, sequence_parallel=True, zero_stage=1, gradient_clipping=0.5)
    assert get_plugin_config(plugin) == expected
    monkeypatch.setenv("HF_MEGATRON_ZERO_STAGE", "3")
    assert get_plugin_config(plugin) == dataclasses.replace(expected, zero_stage=3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_micro_batches": 4},
        {"train_iters": 10},
        {"lr_decay_style": "cosine"},
        {"other_megatron_args": {"bf16": True}},
        {"num_layers_per_virtual_pipeline_stage": 2},
        {"recompute_method": "block"},
        {"attention_dropout": 0.1},
        {"attention_backend": False},
    ],
    ids=str,
)
def test_unsupported_plugin_attributes_are_rejected(arguments):
    with pytest.raises(UnsupportedError, match=next(iter(arguments))):
        get_plugin_config(MegatronLMPlugin(**arguments))


def test_megatron_plugin(monkeypatch):
    expected = MegatronConfig(tp_size=2, zero_stage=3)
    assert MegatronPlugin(tp_size=2, zero_stage=3).config == MegatronPlugin(expected).config == expected
    assert MegatronPlugin({"tp_size": 2, "zero_stage": 3}).config == expected
    assert MegatronPlugin().config == MegatronConfig()
    monkeypatch.setenv("HF_MEGATRON_TP_SIZE", "4")
    assert MegatronPlugin().config.tp_size == 4 and MegatronPlugin(zero_stage=0).config.tp_size == 1
    assert "tp_size=4" in repr(MegatronPlugin())
    with pytest.raises(ConfigError, match="not both"):
        MegatronPlugin(expected, tp_size=2)
    with pytest.raises(ConfigError, match="tp_size"):
        MegatronPlugin(tpsize=2)


def test_frozen_model_layouts_round_trip_in_variables():
    layout = MegatronConfig(tp_size=2, frozen_models={"reference": {"zero_stage": 3}})
    assert MegatronConfig.from_dict(parse_field_variables(format_field_variables(layout.to_dict()), ())) == layout
    with pytest.raises(ConfigError, match="HF_MEGATRON_FROZEN_MODELS = 'reference': expected JSON"):
        parse_field_variables({"HF_MEGATRON_FROZEN_MODELS": "reference"}, ())
