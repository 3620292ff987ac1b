"""Environment variables: the launch block of `accelerate launch`, MegatronConfig's fields and rank variables.

Reads and writes of the layout's variables go through this module.
"""

import os
from collections.abc import Mapping
from typing import Any

from ...config import MegatronConfig
from .launch_keys import (
    FIELD_PREFIX,
    format_field_variables,
    merge_fields,
    parse_field_variables,
    parse_launcher_variables,
)

SWITCH = "ACCELERATE_USE_MEGATRON_LM"


# Set once the launcher's block has been taken over, so that later reads and child processes still find it.
TAKEN_OVER = "HF_MEGATRON_LAUNCH"


# Variables that share the prefix of the field variables without being fields.
_INTERNAL = (TAKEN_OVER,)


def take_over_launch() -> None:
    """Clears the switch that would make Accelerate load the legacy Megatron package; idempotent."""
    if os.environ.get(SWITCH, "false").lower() in ("true", "1"):
        os.environ[SWITCH] = "false"
        os.environ[TAKEN_OVER] = "true"


def give_back_launch() -> None:
    """Restores the switch that `take_over_launch` cleared; idempotent."""
    if os.environ.pop(TAKEN_OVER, None) == "true":
        os.environ[SWITCH] = "true"


def config_from_environment(environment: Mapping[str, str] | None = None) -> MegatronConfig:
    """Returns the layout that the launcher describes.

    `HF_MEGATRON_<FIELD>` variables (`HF_MEGATRON_TP_SIZE=2`) override the `megatron_lm_config` block of an accelerate
    YAML (see `launch_keys`), which overrides the defaults.

    Raises:
        ConfigError: a value that cannot be parsed or a name that is not a field, naming the variable.
        UnsupportedError: a key or size that this version does not support.
    """
    return _merged(os.environ if environment is None else environment, {})


def export_layout(layout: MegatronConfig) -> None:
    """Exports a layout to the environment of this process and its child processes."""
    for name in [name for name in os.environ if name.startswith(FIELD_PREFIX) and name not in _INTERNAL]:
        del os.environ[name]
    os.environ.update(format_field_variables(layout.to_dict()))


def _merged(environment: Mapping[str, str], plugin: Mapping[str, Any]) -> MegatronConfig:
    """Merges the launcher's block, a `MegatronLMPlugin`'s fields and `HF_MEGATRON_<FIELD>` variables; the last wins."""
    block = parse_launcher_variables(environment) if _is_launched(environment) else {}
    return MegatronConfig.from_dict(merge_fields(block, plugin, parse_field_variables(environment, _INTERNAL)))


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Returns whether an accelerate YAML of type MEGATRON_LM launched this process."""
    return environment.get(TAKEN_OVER) == "true" or environment.get(SWITCH, "false").lower() in ("true", "1")


def job_world_size() -> int:
    """Returns the number of ranks of this job, before or after the process group exists."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def look_for_gpus_without_using_them() -> None:
    """Configures torch to detect GPUs through NVML, after which forked processes can still use them."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
