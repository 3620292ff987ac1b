"""Accelerate: the launch environment in, and an Accelerator that knows which ranks share a batch.

The only file that reads or writes the environment. Stock `accelerate launch` with `distributed_type: MEGATRON_LM`
exports its `megatron_lm_config` block as `MEGATRON_LM_*`; `Accelerator()` would then ask for the legacy Megatron
package, so the block is read here and the switch is cleared when hf_megatron is imported.
"""

import functools
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..config import MegatronConfig
from ..errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

SWITCH = "ACCELERATE_USE_MEGATRON_LM"
# Set once the launcher's block has been taken over, so that later reads and child processes still find it.
TAKEN_OVER = "HF_MEGATRON_LAUNCH"
RANKS_PER_BATCH = "HF_MEGATRON_RANKS_PER_BATCH"

# The launcher's variables and what each may hold until this library supports more.
_SIZES = {
    "MEGATRON_LM_TP_DEGREE": "tp_size",
    "MEGATRON_LM_PP_DEGREE": "pp_size",
    "MEGATRON_LM_CONTEXT_PARALLEL_SIZE": "cp_size",
    "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": "ep_size",
}
_SEQUENCE_PARALLEL = "MEGATRON_LM_SEQUENCE_PARALLELISM"


def take_over_launch() -> None:
    """Clears the switch that would make Accelerate look for the legacy Megatron package; twice is once."""
    if os.environ.get(SWITCH, "false").lower() in ("true", "1"):
        os.environ[SWITCH] = "false"
        os.environ[TAKEN_OVER] = "true"


def config_from_environment(environment: Mapping[str, str] | None = None) -> MegatronConfig:
    """The layout the launcher describes: the `megatron_lm_config` block of an accelerate YAML, else all sizes 1.

    Raises:
        ConfigError: a value that is no integer or no truth value, naming the variable.
        UnsupportedError: a size this version does not support.
    """
    environment = os.environ if environment is None else environment
    if environment.get(TAKEN_OVER) != "true" and environment.get(SWITCH, "false").lower() not in ("true", "1"):
        return MegatronConfig()
    values: dict[str, Any] = {}
    for name, field in _SIZES.items():
        text = environment.get(name, "1")
        if not text.isdigit():
            raise ConfigError(f"{name} = {text!r} (megatron_lm_config of the accelerate YAML): expected an integer.")
        values[field] = int(text)
    text = environment.get(_SEQUENCE_PARALLEL, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise ConfigError(f"{_SEQUENCE_PARALLEL} = {text!r}: expected true or false.")
    # The block accelerate writes says `sequence_parallelism: true` also for tp 1, where it has no meaning.
    values["sequence_parallel"] = text in ("true", "1") and values["tp_size"] > 1
    return MegatronConfig.from_dict(values)


def job_world_size() -> int:
    """Ranks of this job, before or after the process group exists."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def ensure_process_group(timeout: float) -> "torch.device":
    """Joins the job's process group through Accelerate's `PartialState`; returns this rank's device.

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
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    if not torch.accelerator.is_available():
        # Otherwise a TrainingArguments or Accelerator created later reports one process on every rank.
        os.environ["ACCELERATE_USE_CPU"] = "true"
        use_cpu = True
    state = PartialState(cpu=use_cpu, timeout=timedelta(seconds=timeout))
    if not dist.is_initialized():
        raise ConfigError(
            "Accelerate's state was created before the model and did not join the job's ranks. On CPUs pass "
            "TrainingArguments(use_cpu=True) or Accelerator(cpu=True), or load the model first."
        )
    # Accelerate says `cpu:0`, which torch takes for another device than `cpu`: every weight would be copied.
    return torch.device("cpu") if state.device.type == "cpu" else state.device


def announce(config: MegatronConfig) -> None:
    """Tells Accelerators created from now on how many ranks share a batch."""
    os.environ[RANKS_PER_BATCH] = str(config.ranks_per_replica)


def set_rank_environment(rank: int, world_size: int) -> None:
    """What a launcher would export for this rank; used by the fork harness of `hf_megatron.verify`."""
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
    )


def parallelism_config(ranks_per_batch: int) -> Any:
    """A `ParallelismConfig` that declares these ranks as tensor parallel, on CPUs too.

    The stock class refuses MULTI_CPU because its own engines do not run there.
    """
    from accelerate import DistributedType, ParallelismConfig

    class MegatronParallelismConfig(ParallelismConfig):
        def _validate_accelerator(self, accelerator: Any) -> None:
            if accelerator.distributed_type is not DistributedType.MULTI_CPU:
                super()._validate_accelerator(accelerator)
            elif self.total_size != accelerator.num_processes:
                raise ConfigError(f"The layout uses {self.total_size} ranks, the job has {accelerator.num_processes}.")

    return MegatronParallelismConfig(tp_size=ranks_per_batch)


def _is_ours(accelerator: Any) -> bool:
    config = accelerator.parallelism_config
    return config is not None and type(config).__name__ == "MegatronParallelismConfig"


def _state(model: Any) -> Any:
    from ..parallelize import parallel_state

    return parallel_state(model)


def init(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        ranks = int(os.environ.get(RANKS_PER_BATCH, "1"))
        if os.environ.get(TAKEN_OVER) == "true":
            ranks = max(ranks, config_from_environment().ranks_per_replica)
        if ranks > 1 and kwargs.get("parallelism_config") is None:
            for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin"):
                if kwargs.get(name) is not None:
                    raise UnsupportedError(f"Accelerator({name}=...) beside megatron_config: drop the plugin.")
            kwargs["parallelism_config"] = parallelism_config(ranks)
        original(self, *args, **kwargs)

    return wrapper


def prepare_model(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if _state(model) is not None and not _is_ours(self):
            raise ConfigError(
                "This Accelerator was created before the model was loaded with megatron_config and splits batches over "
                "all ranks. Create it after the model, or launch with an accelerate YAML of type MEGATRON_LM."
            )
        return original(self, model, *args, **kwargs)

    return wrapper


def prepare_scheduler(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = original(self, *args, **kwargs)
        if _is_ours(self):
            # Stock steps once per rank of the world; ranks that share a batch are one.
            scheduler.split_batches = True
        return scheduler

    return wrapper


def clip_grad_norm_(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not _is_ours(self):
            return original(self, parameters, max_norm, norm_type=norm_type)
        from ..data_parallel.gradient_norm import clip_grad_norm

        self.unscale_gradients()
        return clip_grad_norm(parameters, max_norm, norm_type)

    return wrapper


def gather(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, tensor: Any) -> Any:
        # Every rank holds the same batch: what each has is the whole already.
        return tensor if _is_ours(self) else original(self, tensor)

    return wrapper


def gather_for_metrics(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        objects = use_gather_object or isinstance(input_data, list) and not any(map(_is_tensor, input_data))
        if not _is_ours(self) or not objects:
            # Tensors go through `gather` above; stock then drops what fills up the last batch.
            return original(self, input_data, use_gather_object)
        state = self.gradient_state
        return input_data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else input_data

    return wrapper


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def save_state(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_state(model) is not None for model in self._models):
            raise UnsupportedError(
                "Accelerator.save_state writes the first rank's shards; sharded checkpoints are not supported yet. "
                "Save the weights with model.save_pretrained(...)."
            )
        return original(self, *args, **kwargs)

    return wrapper


def get_state_dict(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, model: Any, unwrap: bool = True) -> Any:
        if _state(model) is None:
            return original(self, model, unwrap)
        from ..checkpoint.merged import full_state_dict

        return full_state_dict(model)

    return wrapper
