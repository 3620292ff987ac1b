"""Keys of accelerate's `megatron_lm_config`: the `MegatronConfig` fields they set, and the values that are rejected.

A key has one name and three spellings: `megatron_lm_tp_degree` in an accelerate YAML, `MEGATRON_LM_TP_DEGREE` in the
environment of a launched rank, `tp_degree` as an attribute of accelerate's `MegatronLMPlugin`. `LAUNCH_KEYS` is the
complete list; a key that accelerate adds later is rejected until it has an entry. This module does not read the
environment.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import MegatronConfig
from ...errors import ConfigError, UnsupportedError

PREFIX = "MEGATRON_LM_"
FIELD_PREFIX = "HF_MEGATRON_"
_LISTS = ("pipeline_partition", "hierarchical_context_parallel_sizes")
_TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


@dataclass(frozen=True)
class LaunchKey:
    """One key of `megatron_lm_config`.

    Args:
        parse (`type`): `int`, `float`, `bool` or `str`.
        default (`Any`): value that `MegatronLMPlugin` fills in when neither its caller nor the launcher sets one; in a
            plugin object this value therefore counts as unset.
        field (`str`, *optional*): field of `MegatronConfig` that receives the value.
        values (`Mapping`, *optional*): value -> the field's value; a missing value is rejected. `None` as the field's
            value leaves the field at its default.
        accepted (`tuple`): for a key without a field, and for microbatches without stages, the values under which this
            library behaves as the key requests.
        instead (`str`): alternative to a rejected value.
    """

    parse: type
    default: Any
    field: str | None = None
    values: Mapping[Any, Any] | None = None
    accepted: tuple[Any, ...] = ()
    instead: str = ""


_MODEL = "set it in the model's config instead (from_pretrained(..., {})"


def _only(default: Any, instead: str) -> LaunchKey:
    """Returns the entry of a key whose default is the only supported behavior."""
    return LaunchKey(type(default), default, accepted=(default,), instead=instead)


LAUNCH_KEYS: Mapping[str, LaunchKey] = {
    "tp_degree": LaunchKey(int, 1, "tp_size"),
    "pp_degree": LaunchKey(int, 1, "pp_size"),
    # 2 is the default of accelerate 1.15.
    "context_parallel_size": LaunchKey(int, 2, "cp_size"),
    "expert_model_parallel_size": LaunchKey(int, 1, "ep_size"),
    # Without expert_model_parallel_size, accepted if equal to tp_degree, see `_fields`.
    "expert_tensor_parallel_size": LaunchKey(
        int,
        1,
        "etp_size",
        instead="expert weights are sharded over the tensor-parallel ranks: leave it out, set it to tp_degree, or set "
        "expert_model_parallel_size as well",
    ),
    "sequence_parallelism": LaunchKey(bool, False, "sequence_parallel"),
    "use_distributed_optimizer": LaunchKey(bool, False, "zero_stage", values={True: 1, False: 0}),
    "optimizer_cpu_offload": LaunchKey(bool, False, "offload_optimizer"),
    "recompute_activations": LaunchKey(bool, False, "recompute", values={True: "selective", False: None}),
    "recompute_granularity": LaunchKey(str, "full", "recompute", values={"full": "full", "selective": "selective"}),
    "recompute_method": _only("uniform", "every layer is recomputed"),
    "recompute_num_layers": _only(1, "every layer is recomputed separately"),
    "gradient_clipping": LaunchKey(float, 1.0, "gradient_clipping"),
    "num_micro_batches": LaunchKey(
        int,
        1,
        "num_microbatches",
        accepted=(1,),
        instead="microbatches need pp_degree above 1; use gradient_accumulation_steps instead",
    ),
    "decoder_last_pipeline_num_layers": LaunchKey(
        int, None, instead="set the number of layers of all stages, such as HF_MEGATRON_PIPELINE_PARTITION=3,2"
    ),
    "use_custom_fsdp": _only(False, "to shard the weights over the data-parallel ranks, set HF_MEGATRON_ZERO_STAGE=3"),
    "no_load_optim": _only(False, "to start with a new optimizer, do not load the checkpoint's state"),
    "no_save_optim": _only(False, "to save only the weights, call save_pretrained or set save_only_model"),
    "use_precision_aware_optimizer": _only(False, "the optimizer class determines the precision of its state"),
    "overlap_cpu_optimizer_d2h_h2d": _only(False, "copies of an offloaded optimizer are not overlapped"),
    "eod_mask_loss": _only(False, "set the labels of masked tokens to -100 in the data collator"),
    "calculate_per_token_loss": _only(True, "the loss is a mean over tokens, as Trainer computes it"),
    "attention_backend": LaunchKey(
        str, True, accepted=("true", "1", "auto"), instead="use from_pretrained(..., attn_implementation=)"
    ),
    "attention_softmax_in_fp32": _only(True, "all attention implementations compute the softmax in fp32"),
    "attention_dropout": LaunchKey(float, 0.0, instead=_MODEL.format("attention_dropout=)")),
    "hidden_dropout": LaunchKey(float, 0.0, instead=_MODEL.format("<its dropout field>=)")),
    "use_rotary_position_embeddings": LaunchKey(bool, True, instead="the model determines its position embeddings"),
}

# Attributes of accelerate's plugin without a variable or key, and their alternatives.
_PLUGIN_ONLY = {
    "num_layers_per_virtual_pipeline_stage": (
        "set MegatronConfig(virtual_stages=...) or HF_MEGATRON_VIRTUAL_STAGES to the number of stages per rank, with "
        "an interleaved pipeline_schedule"
    ),
}
# Keys that only have a meaning if the other key is above 1.
_BESIDE = {"num_micro_batches": "pp_degree", "expert_tensor_parallel_size": "expert_model_parallel_size"}
_ENGINE = "leave it out: it configures accelerate's Megatron engine, which hf_megatron replaces"


def _parse(kind: type, text: str, source: str) -> Any:
    """Parses the text of a variable as `int`, `float`, `bool` or `str`; raises `ConfigError` naming `source`."""
    text = text.strip()
    try:
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "an integer", float: "a number"}[kind]
        raise ConfigError(f"{source} = {text!r}: expected {expected}.") from None


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(
            f'{source} = {text!r}: expected JSON, such as {{"reference": {{"zero_stage": 3}}}}.'
        ) from None


def _no_such_name(variable: str, text: str, problem: str, prefix: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(variable[len(prefix) :].lower(), known, n=3) or known
    valid = ", ".join(prefix + name.upper() for name in near)
    return ConfigError(f"{variable} = {text!r}: {problem}; valid: {valid}.")


def _fields(parsed: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Turns key -> (parsed value, how the user wrote it) into fields of `MegatronConfig`."""
    fields: dict[str, Any] = {}
    for name, (value, source) in parsed.items():
        key = LAUNCH_KEYS[name]
        needed = _BESIDE.get(name)
        if key.field is None or (needed is not None and parsed.get(needed, (1, ""))[0] == 1):
            valid = key.accepted
            if name == "expert_tensor_parallel_size":
                valid = (parsed.get("tp_degree", (1, ""))[0],)
            if (value.lower() if isinstance(value, str) else value) not in valid:
                listing = f"valid: {' or '.join(str(choice).lower() for choice in valid)}" if valid else "leave it out"
                raise UnsupportedError(
                    f"{source} = {value!r} (megatron_lm_{name} in megatron_lm_config) is not supported, {listing}; "
                    f"{key.instead}."
                )
            continue
        if name == "gradient_clipping":
            # accelerate documents 0 as "no clipping".
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{source} = {value!r}: expected a norm of 0 (no clipping) or more.")
            value = value or None
        elif key.values is not None:
            if value not in key.values:
                raise ConfigError(f"{source} = {value!r}: expected {' or '.join(map(str, key.values))}.")
            value = key.values[value]
        if value is None and name != "gradient_clipping":
            continue
        if fields.get(key.field, value) != value:
            raise ConfigError(
                f"{source} = {value!r} contradicts {key.field} = {fields[key.field]!r}, which another key sets."
            )
        fields[key.field] = value
    return fields


def parse_launcher_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of `MegatronConfig` that the launcher's `MEGATRON_LM_*` variables set.

    Raises:
        ConfigError: a value that cannot be parsed, or a variable without a key.
        UnsupportedError: a value without a counterpart here, naming the key and the valid values.
    """
    parsed = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in LAUNCH_KEYS:
            raise _no_such_name(variable, text, "not a key of megatron_lm_config", PREFIX, list(LAUNCH_KEYS))
        # An empty YAML value arrives as the text None.
        if text != "None":
            parsed[name] = _parse(LAUNCH_KEYS[name].parse, text, variable), variable
    return _fields(parsed)


def parse_plugin_fields(plugin: Any) -> dict[str, Any]:
    """Returns the fields of `MegatronConfig` that an accelerate `MegatronLMPlugin` sets; its defaults set nothing.

    Raises:
        ConfigError: a value out of range.
        UnsupportedError: an attribute that differs from its default and has no counterpart here.
    """
    parsed = {}
    for attribute in dataclasses.fields(plugin):
        value, source = getattr(plugin, attribute.name), f"MegatronLMPlugin({attribute.name}=...)"
        key = LAUNCH_KEYS.get(attribute.name)
        if key is None:
            if value != attribute.default:
                instead = _PLUGIN_ONLY.get(attribute.name, _ENGINE)
                raise UnsupportedError(f"{source} = {value!r} is not supported; {instead}.")
        elif value != key.default:
            parsed[attribute.name] = (str(value).lower() if key.parse is str else value), source
    return _fields(parsed)


def parse_field_variables(environment: Mapping[str, str], internal: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of `MegatronConfig` set by `HF_MEGATRON_<FIELD>` variables other than the `internal` ones.

    Raises:
        ConfigError: a name that is not a field, or a value that cannot be parsed as the field's type.
    """
    known = typing.get_type_hints(MegatronConfig)
    fields: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(FIELD_PREFIX) or variable in internal:
            continue
        name = variable[len(FIELD_PREFIX) :].lower()
        if name not in known:
            raise _no_such_name(variable, text, f"MegatronConfig has no field {name!r}", FIELD_PREFIX, list(known))
        kinds = typing.get_args(known[name]) or (known[name],)
        counts = text.strip("[]() ").split(",")
        if name == "frozen_models" and text.strip().lower() not in ("none", ""):
            fields[name] = _parse_json(text, variable)
        elif name in _LISTS and counts[0].strip().isdecimal():
            fields[name] = tuple(_parse(int, count, variable) for count in counts)
        elif types.NoneType in kinds and text.strip().lower() in ("none", ""):
            fields[name] = None
        else:
            fields[name] = _parse(next(kind for kind in kinds if kind is not types.NoneType), text, variable)
    return fields


def format_field_variables(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the `HF_MEGATRON_<FIELD>` variables that set fields of `MegatronConfig`."""
    texts = {name: json.dumps(value) if isinstance(value, Mapping) else str(value) for name, value in fields.items()}
    return {f"{FIELD_PREFIX}{name.upper()}": text for name, text in texts.items()}


def merge_fields(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the fields of all layers, later ones over earlier ones."""
    fields = {name: value for layer in layers for name, value in layer.items()}
    # The block that accelerate writes has `sequence_parallelism: true` even for tp 1, where it has no meaning. If the
    # last layer has it, the user set the field explicitly, and validation must report it.
    if fields.get("tp_size", 1) == 1 and "sequence_parallel" not in layers[-1]:
        fields.pop("sequence_parallel", None)
    return fields
