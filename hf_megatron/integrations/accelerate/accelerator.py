"""Accelerate: the launch environment in, and an Accelerator that knows which ranks share a batch.

The only file that reads or writes the environment. Stock `accelerate launch` with `distributed_type: MEGATRON_LM`
exports its `megatron_lm_config` block as `MEGATRON_LM_*`; `Accelerator()` would then ask for the legacy Megatron
package, so the block is read here and the switch is cleared when hf_megatron is imported.
"""

import dataclasses
import gc
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compat.patch_registry import LEDGER
from ...config import MegatronConfig
from ...errors import ConfigError, UnsupportedError
from .launch_keys import (
    FIELD_PREFIX,
    fields_of_block,
    fields_of_plugin,
    fields_of_variables,
    merge_fields,
    variables_of_fields,
)

if TYPE_CHECKING:
    import torch

SWITCH = "ACCELERATE_USE_MEGATRON_LM"
# Set once the launcher's block has been taken over, so that later reads and child processes still find it.
TAKEN_OVER = "HF_MEGATRON_LAUNCH"

# Ranks start at different times: joining the job gets at least this long, whatever a collective may take.
_START_SECONDS = 60.0
# Collectives that torch's flight recorder keeps, in memory of the host.
_RECORDED = "2000"

# Variables with the prefix of the fields that are no fields.
_INTERNAL = (TAKEN_OVER,)


def take_over_launch() -> None:
    """Clears the switch that would make Accelerate look for the legacy Megatron package; twice is once."""
    if os.environ.get(SWITCH, "false").lower() in ("true", "1"):
        os.environ[SWITCH] = "false"
        os.environ[TAKEN_OVER] = "true"


def give_back_launch() -> None:
    """Sets the switch again that `take_over_launch` cleared; twice is once."""
    if os.environ.pop(TAKEN_OVER, None) == "true":
        os.environ[SWITCH] = "true"


def config_from_environment(environment: Mapping[str, str] | None = None) -> MegatronConfig:
    """Reads the layout that the launcher describes.

    `HF_MEGATRON_<FIELD>` variables (`HF_MEGATRON_TP_SIZE=2`) over the `megatron_lm_config` block of an accelerate YAML
    (see `launch_keys`), over the defaults.

    Raises:
        ConfigError: a value that cannot be read or a name that is no field, naming the variable.
        UnsupportedError: a key or size this version does not support.
    """
    return _merged(os.environ if environment is None else environment, {})


def export_layout(layout: MegatronConfig) -> None:
    """Has this process and those that it starts read a layout from the environment."""
    for name in [name for name in os.environ if name.startswith(FIELD_PREFIX) and name not in _INTERNAL]:
        del os.environ[name]
    os.environ.update(variables_of_fields(layout.to_dict()))


def _merged(environment: Mapping[str, str], plugin: Mapping[str, Any]) -> MegatronConfig:
    """Merges the launcher's block, what a `MegatronLMPlugin` adds, and `HF_MEGATRON_<FIELD>` variables over both."""
    block = fields_of_block(environment) if _is_launched(environment) else {}
    return MegatronConfig.from_dict(merge_fields(block, plugin, fields_of_variables(environment, _INTERNAL)))


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Tells whether an accelerate YAML of type MEGATRON_LM started this process."""
    return environment.get(TAKEN_OVER) == "true" or environment.get(SWITCH, "false").lower() in ("true", "1")


class MegatronPlugin:
    """Tells an `Accelerator` which ranks share a batch, before or after the model is loaded.

        plugin = MegatronPlugin(tp_size=2)
        accelerator = Accelerator(megatron_lm_plugin=plugin)
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=plugin.config)

    Args:
        config (`MegatronConfig`, `dict` or path of a YAML file, *optional*): the layout.
        fields: fields of `MegatronConfig`, instead of `config`. With neither, what the launcher says
            (`config_from_environment()`); otherwise exactly what is passed.

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


def job_world_size() -> int:
    """Returns the number of ranks of this job, before or after the process group exists."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def ensure_process_group(timeout: float, cpu: bool = False) -> "torch.device":
    """Joins the job's process group through Accelerate's `PartialState`; returns this rank's device.

    A collective may take `timeout` seconds. With `cpu` the ranks are CPUs where there are accelerators too.

    Raises:
        ConfigError: something created Accelerate's state before, without joining the job's ranks.
    """
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise UnsupportedError(
                f"ACCELERATE_USE_{name} is set (accelerate's {name} plugin) beside megatron_config: launch without it."
            )
    use_cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    use_cpu = use_cpu or not torch.accelerator.is_available()
    records = _flight_records(is_nccl=not use_cpu)
    state = PartialState(cpu=use_cpu, timeout=timedelta(seconds=max(timeout, _START_SECONDS)))
    if not dist.is_initialized():
        raise ConfigError(
            "Accelerate's state was created before the model and did not join the job's ranks. On CPUs pass "
            "TrainingArguments(use_cpu=True) or Accelerator(cpu=True), or load the model first."
        )
    if dist.get_world_size() > 1:
        from ...core.communication.watchdog import watch_ranks

        # torchrun and accelerate launch hold the store in the launcher, which outlives the ranks.
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "false").lower() == "true"
        watch_ranks(timeout, store_host=None if by_launcher else 0, records=records)
    # Accelerate says `cpu:0`, which torch takes for another device than `cpu`: every weight would be copied.
    return torch.device("cpu") if state.device.type == "cpu" else state.device


def _flight_records(*, is_nccl: bool) -> Path | None:
    """Has torch record the last collectives of NCCL; returns where records of a job that stands still go.

    What is set already stays. On gloo nothing is recorded unless `TORCH_FR_BUFFER_SIZE` is set.
    """
    size, older = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    if is_nccl and size not in os.environ:
        os.environ[size] = os.environ.get(older, _RECORDED)
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if os.environ.get(size, "0") == "0":
        return None
    if named := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):
        return Path(named).parent
    folder = Path(tempfile.gettempdir(), f"hf_megatron_flight_{os.environ.get('MASTER_PORT', 'job')}")
    # What NCCL itself writes at its timeout, into a folder that has to be there.
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}_nccl_rank"
    return folder


def default_timeout(original: Callable, backend: Any = None) -> timedelta:
    """Gives groups made without a timeout of their own (meshes, FSDP2) the job's instead of half an hour."""
    from ...core.communication.watchdog import running_watch

    watch = running_watch()
    return original(backend) if watch is None else timedelta(seconds=watch.timeout)


def layout_of_models() -> MegatronConfig | None:
    """Returns the layout of the laid out model that was loaded last, of those that still exist."""
    if LEDGER.models:
        # A model that was dropped may wait for the cyclic collector.
        gc.collect()
    models = LEDGER.models
    return _state(models[-1]).config if models else None


def set_rank_environment(rank: int, world_size: int) -> None:
    """Exports what a launcher would for this rank; used by the fork harness of `hf_megatron.testing`."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
        # Without a name gloo asks the resolver for this host's address, which may not answer.
        GLOO_SOCKET_IFNAME="lo",
        # Whether or not there are accelerators beside them.
        ACCELERATE_USE_CPU="true",
    )


def set_gpu_environment(rank: int, world_size: int, gpus: int) -> None:
    """Makes a rank of `set_rank_environment` one on a GPU.

    NCCL refuses two ranks of one host on one GPU. Ranks that share one are given hosts of their own, which talk through
    sockets.
    """
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if gpus < world_size:
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", LOCAL_RANK=str(rank % gpus)
        )


def look_for_gpus_without_using_them() -> None:
    """Has torch ask the driver's management library whether there are GPUs, after which forks can still use them."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def parallelism_config(ranks_per_batch: int) -> Any:
    """Makes this job's `ParallelismConfig`: ranks that share a batch are tensor parallel there, the others dp shards.

    From it Accelerate's data loaders give each dp rank its own batches. The stock class refuses MULTI_CPU, because its
    own engines do not run there, and on GPUs counts the processes as `Accelerator.num_processes`, which here are the
    replicas.
    """
    from accelerate import ParallelismConfig

    class MegatronParallelismConfig(ParallelismConfig):
        def _validate_accelerator(self, accelerator: Any) -> None:
            if self.total_size != accelerator.state.num_processes:
                raise ConfigError(
                    f"The layout uses {self.total_size} ranks, the job has {accelerator.state.num_processes}."
                )

    # Every size is given: those left out would be read from PARALLELISM_CONFIG_* variables.
    shards = max(1, job_world_size() // ranks_per_batch)
    return MegatronParallelismConfig(
        tp_size=ranks_per_batch, dp_shard_size=shards, dp_replicate_size=1, cp_size=1, sp_size=1
    )


def is_ours(accelerator: Any) -> bool:
    """Tells whether an Accelerator was set up for a layout of this library."""
    return type(accelerator.parallelism_config).__name__ == "MegatronParallelismConfig"


def replicas(accelerator: Any) -> int:
    """Counts the data parallel replicas of an Accelerator that was set up for a layout of this library."""
    config = accelerator.parallelism_config
    return config.total_size // config.tp_size


def _state(model: Any) -> Any:
    from ...parallel_state import parallel_state

    return parallel_state(model)


def config_of_plugin(plugin: Any) -> MegatronConfig | None:
    """Returns the layout that our plugin or accelerate's describes, `None` for anything else.

    What accelerate's class leaves at its defaults comes from the launcher.
    """
    from accelerate.utils import MegatronLMPlugin

    if isinstance(plugin, MegatronPlugin):
        return plugin.config
    if isinstance(plugin, MegatronLMPlugin):
        return _merged(os.environ, fields_of_plugin(plugin))
    return None


def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Sets an Accelerator up for the layout of its plugin, of the last model or, without either, of the launcher."""
    arguments = dict(inspect.signature(original).bind(self, *args, **kwargs).arguments)
    del arguments["self"]
    by_plugin = arguments.get("megatron_lm_plugin") is not None
    of_models = layout_of_models()
    config = config_of_plugin(arguments.get("megatron_lm_plugin"))
    if config is not None:
        del arguments["megatron_lm_plugin"]
    elif of_models is None:
        variables = (name for name in os.environ if name.startswith(FIELD_PREFIX) and name not in _INTERNAL)
        if _is_launched(os.environ) or any(variables):
            config = config_from_environment()
    if config is not None:
        from ...config import validate_world_size

        validate_world_size(config, job_world_size())
        if job_world_size() > 1:
            ensure_process_group(config.timeout, cpu=bool(arguments.get("cpu")))
        if by_plugin:
            self._hf_megatron_plugin = config
    config = config or of_models
    if config is not None and job_world_size() > 1 and arguments.get("parallelism_config") is None:
        for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin"):
            if arguments.get(name) is not None:
                raise UnsupportedError(f"Accelerator({name}=...) beside megatron_config: drop the plugin.")
        arguments["parallelism_config"] = parallelism_config(config.ranks_per_replica)
    mine = type(arguments.get("parallelism_config")).__name__ == "MegatronParallelismConfig"
    original(self, **_with_data(arguments) if mine else arguments)


def _with_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """Adds data loading to the arguments that gives ranks of one batch the same samples and other ranks others.

    Unless the loop configures it, shuffling depends on one seed and the epoch alone: stock draws from a generator whose
    state at the start of the epoch nobody can tell later, so no order could be resumed.
    """
    from accelerate.utils import DataLoaderConfiguration

    layout = arguments["parallelism_config"]
    configuration = arguments.get("dataloader_config")
    if configuration is None:
        configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=_seed_of_first_rank())
    if layout.tp_size > 1 and layout.dp_shard_size > 1:
        if configuration.dispatch_batches:
            raise UnsupportedError(
                f"dispatch_batches=True with {layout.dp_shard_size} dp ranks of {layout.tp_size} ranks each: "
                "Accelerate would send all of them the same batch. Leave it out; each rank then reads its own batches."
            )
        # None means True for an IterableDataset.
        configuration = dataclasses.replace(configuration, dispatch_batches=False)
    arguments = arguments | {"dataloader_config": configuration}
    if layout.dp_shard_size == 1 and arguments.get("rng_types") is None:
        # A shuffling sampler draws its seed from torch's generator; with one dp rank stock does not align it.
        arguments["rng_types"] = ["torch", "generator"]
    return arguments


def _seed_of_first_rank() -> int:
    import torch
    import torch.distributed as dist

    seed: list[Any] = [torch.random.initial_seed()]
    if dist.is_initialized():
        dist.broadcast_object_list(seed, src=0)
    return seed[0]


def prepare_model(
    original: Callable,
    self: Any,
    model: Any,
    device_placement: Any = None,
    evaluation_mode: bool = False,
    **kwargs: Any,
) -> Any:
    """Prepares a laid out model as it is, whose layout has to be the Accelerator's, and what is made around one."""
    from ...parallel_state import model_inside

    if (inner := model_inside(model)) is not model:
        return _prepare_around(original, self, model, inner, **kwargs)
    if _state(model) is not None:
        if not (evaluation_mode and _shares_batches(self, _state(model).config)):
            _require_fitting(self, model)
        # Stock's evaluation mode applies mixed precision and leaves out DistributedDataParallel: gradients are
        # reduced by the model's own hooks.
        return original(self, model, device_placement, True, **kwargs)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if LEDGER.models and trained and not evaluation_mode:
        from .wrapped_models import model_to_prepare

        inner = model_to_prepare(model)
        if inner is not None:
            return _prepare_around(original, self, model, inner, **kwargs)
    if LEDGER.launch is not None and not evaluation_mode:
        LEDGER.launch.require_laid_out(model)
    # Stock takes a whole model beside tensor parallel ones for a mistake, unless it is only asked.
    return original(self, model, device_placement, evaluation_mode or (is_ours(self) and not trained), **kwargs)


def _prepare_around(original: Callable, self: Any, module: Any, model: Any, **kwargs: Any) -> Any:
    """Prepares a module without weights of its own; what is saved, loaded and counted is the laid out model in it."""
    _require_fitting(self, model)
    if getattr(module, "_is_accelerate_prepared", False):
        prepared = module
    else:
        prepared = original(self, module, False, True, **kwargs)
        # Stock marks what it finds among its models.
        prepared._is_accelerate_prepared = True
    others = [other for other in self._models if other is not prepared and other is not model]
    self._models[:] = [*others, model]
    return prepared


def _require_fitting(self: Any, model: Any) -> None:
    """Raises if the Accelerator splits batches otherwise than a laid out model, and tells the model its factors."""
    state = _state(model)
    if not is_ours(self):
        raise ConfigError(
            "This Accelerator was created before the model was loaded with megatron_config and splits batches over "
            "all ranks. Create it after the model, pass it megatron_lm_plugin=MegatronPlugin(...), or launch with "
            "an accelerate YAML of type MEGATRON_LM."
        )
    _require_same_layout(self, state.config)
    if state.pipeline is not None and self.scaler is not None:
        # What `backward` multiplies a loss by, unless the loop does something to it as well.
        state.pipeline.loss_scale.usual = lambda: self.scaler.get_scale() / self.gradient_accumulation_steps


def _shares_batches(accelerator: Any, layout: MegatronConfig) -> bool:
    """Tells whether ranks that share a batch of a model that is only asked are given the same one."""
    return is_ours(accelerator) and accelerator.parallelism_config.tp_size % layout.ranks_per_replica == 0


def _require_same_layout(accelerator: Any, config: MegatronConfig) -> None:
    """Raises if the Accelerator was set up for another layout than the model has."""
    ranks = accelerator.parallelism_config.tp_size
    if config.ranks_per_replica != ranks:
        raise ConfigError(
            f"The model was loaded with {config.ranks_per_replica} ranks per batch (tp_size x cp_size x pp_size), this "
            f"Accelerator was set up for {ranks}. Create it after the model, or pass both the same MegatronConfig."
        )
    plugin = getattr(accelerator, "_hf_megatron_plugin", None)
    loaded = config.to_dict()
    asked = {} if plugin is None else plugin.to_dict() | {"dp_size": config.dp_size}
    if differing := [f"{k} = {loaded[k]!r} (plugin: {value!r})" for k, value in asked.items() if value != loaded[k]]:
        raise ConfigError(
            f"The model was loaded with {', '.join(differing)}. Pass it the plugin's: megatron_config=plugin.config."
        )


def prepare_tp(original: Callable, self: Any, *args: Any) -> Any:
    """Prepares nothing more: stock would put the model's DTensors back into the optimizer's groups."""
    return list(args) if is_ours(self) else original(self, *args)


def num_processes(original: Callable, self: Any) -> int:
    """Counts the replicas, each of which has batches of its own: loops scale schedules and losses by it."""
    return replicas(self) if is_ours(self) else original(self)


def prepare_scheduler(original: Callable, self: Any, scheduler: Any) -> Any:
    """Has the scheduler step once for each replica, not for each rank."""
    prepared = original(self, scheduler)
    if not is_ours(self) or prepared is scheduler:
        return prepared
    from .scheduler import SchedulerOfReplicas

    self._schedulers[-1] = SchedulerOfReplicas(prepared, replicas(self))
    return self._schedulers[-1]


def clip_grad_norm_(original: Callable, self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    """Clips the gradients of parameters, of any shape, by the norm of the whole model's."""
    if not is_ours(self):
        return original(self, parameters, max_norm, norm_type=norm_type)
    from ...data_parallel.grad_norm import clip_grad_norm

    self.unscale_gradients()
    return clip_grad_norm(parameters, max_norm, norm_type)


def get_state_dict(original: Callable, self: Any, model: Any, unwrap: bool = True) -> Any:
    """Returns all weights in full, of any shape, on rank 0 and nothing on the others."""
    if not LEDGER.models:
        return original(self, model, unwrap)
    from .wrapped_models import full_state_dict_around

    found = full_state_dict_around(model)
    return original(self, model, unwrap) if found is None else found
