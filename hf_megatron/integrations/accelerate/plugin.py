"""`MegatronPlugin`, and the `ParallelismConfig` that Accelerate gets from a layout."""

import gc
import os
from typing import Any

from ...config import MegatronConfig
from ...core.runtime import RUNTIME
from ...errors import ConfigError
from .environment import _merged, config_from_environment, job_world_size
from .launch_keys import parse_plugin_fields


class MegatronPlugin:
    """Configures an `Accelerator` for a layout, before or after the model is loaded.

        plugin = MegatronPlugin(tp_size=2)
        accelerator = Accelerator(megatron_lm_plugin=plugin)
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=plugin.config)

    Args:
        config (`MegatronConfig`, `dict` or path of a YAML file, *optional*): the layout.
        fields: fields of `MegatronConfig`, instead of `config`. With neither, the layout comes from the launcher
            (`config_from_environment()`); otherwise it is exactly what is passed.

    Raises:
        ConfigError: both a config and fields, or a field with a value out of range.
    """

    config: MegatronConfig

    def __init__(self, config: Any = None, **fields: Any):
        if config is not None and fields:
            raise ConfigError(f"MegatronPlugin(config, {', '.join(fields)}): pass a config or its fields, not both.")
        if config is not None:
            self.config = MegatronConfig.coerce(config)
        elif fields:
            self.config = MegatronConfig.from_dict(fields)
        else:
            self.config = config_from_environment()

    def __repr__(self) -> str:
        return f"MegatronPlugin({self.config!r})"


def get_latest_layout() -> MegatronConfig | None:
    """Returns the layout of the most recently loaded parallelized model that still exists."""
    if RUNTIME.models:
        # A dropped model may stay alive until the cyclic garbage collector runs.
        gc.collect()
    from ...parallel_state import parallel_state

    models = RUNTIME.models
    state = parallel_state(models[-1]) if models else None
    return None if state is None else state.config


def parallelism_config(ranks_per_replica: int) -> Any:
    """Returns this job's `ParallelismConfig`, with model-parallel ranks as tensor parallel and the others as dp shards.

    From it Accelerate's data loaders give each dp rank its own batches. The stock class rejects MULTI_CPU, because
    Accelerate's engines do not run there, and on GPUs compares its size with `Accelerator.num_processes`, which here
    counts replicas.
    """
    from accelerate import ParallelismConfig

    class MegatronParallelismConfig(ParallelismConfig):
        def _validate_accelerator(self, accelerator: Any) -> None:
            if self.total_size != accelerator.state.num_processes:
                raise ConfigError(
                    f"The layout uses {self.total_size} ranks, but the job has {accelerator.state.num_processes}."
                )

    # Set every size: omitted ones would be read from PARALLELISM_CONFIG_* variables.
    shards = max(1, job_world_size() // ranks_per_replica)
    return MegatronParallelismConfig(
        tp_size=ranks_per_replica, dp_shard_size=shards, dp_replicate_size=1, cp_size=1, sp_size=1
    )


def is_ours(accelerator: Any) -> bool:
    """Returns whether an Accelerator was set up for a layout of this library."""
    return type(accelerator.parallelism_config).__name__ == "MegatronParallelismConfig"


def replicas(accelerator: Any) -> int:
    """Returns the number of data-parallel replicas of an Accelerator that was set up for a layout of this library."""
    return accelerator.parallelism_config.total_size // ranks_of_replica(accelerator)


def ranks_of_replica(accelerator: Any) -> int:
    """Returns the number of ranks of each replica: Accelerate's tp axis stands for all model-parallel ranks."""
    return accelerator.parallelism_config.tp_size


def get_plugin_config(plugin: Any) -> MegatronConfig | None:
    """Returns the layout that this library's or accelerate's plugin describes, `None` for anything else.

    Attributes of accelerate's plugin at their defaults are taken from the launcher.
    """
    from accelerate.utils import MegatronLMPlugin

    if isinstance(plugin, MegatronPlugin):
        return plugin.config
    if isinstance(plugin, MegatronLMPlugin):
        return _merged(os.environ, parse_plugin_fields(plugin))
    return None
