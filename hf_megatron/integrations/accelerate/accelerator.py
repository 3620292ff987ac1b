"""Accelerate: Accelerators that know which ranks share a batch, set up from a plugin, a model or the launcher.

`accelerate launch` with `distributed_type: MEGATRON_LM` exports its `megatron_lm_config` block as `MEGATRON_LM_*`.
`Accelerator()` would then require the legacy Megatron package, so the block is read by `environment` and the switch is
cleared when hf_megatron is imported.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DynamoBackend
from torch.optim.lr_scheduler import OneCycleLR

from ...compat.patch_registry import PATCH_REGISTRY
from ...config import MegatronConfig, validate_world_size
from ...core.runtime import RUNTIME
from ...errors import ConfigError, UnsupportedError
from ..torch.layer_compile import compile_layers
from .environment import _INTERNAL, _is_launched, config_from_environment, job_world_size
from .launch_keys import FIELD_PREFIX
from .plugin import get_latest_layout, get_plugin_config, is_ours, parallelism_config, ranks_of_replica, replicas
from .process_group import ensure_process_group

_FILLED_AT_LOADING = ("cp_comm_type", "hierarchical_context_parallel_sizes")


def _state(model: Any) -> Any:
    from ...parallel_state import parallel_state

    return parallel_state(model)


def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Sets up an Accelerator for the layout of its plugin, else of the last model, else of the launcher."""
    arguments = dict(inspect.signature(original).bind(self, *args, **kwargs).arguments)
    del arguments["self"]
    by_plugin = arguments.get("megatron_lm_plugin") is not None
    model_layout = get_latest_layout()
    config = get_plugin_config(arguments.get("megatron_lm_plugin"))
    if config is not None:
        del arguments["megatron_lm_plugin"]
    elif model_layout is None:
        variables = (name for name in os.environ if name.startswith(FIELD_PREFIX) and name not in _INTERNAL)
        if _is_launched(os.environ) or any(variables):
            config = config_from_environment()
    if config is not None:
        PATCH_REGISTRY.activate()
        validate_world_size(config, job_world_size())
        if job_world_size() > 1:
            ensure_process_group(config.timeout, cpu=bool(arguments.get("cpu")))
        if by_plugin:
            self._hf_megatron_plugin = config
    config = config or model_layout
    if config is not None and job_world_size() > 1 and arguments.get("parallelism_config") is None:
        for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin"):
            if arguments.get(name) is not None:
                raise UnsupportedError(
                    f"Accelerator({name}=...) cannot be combined with megatron_config. Remove the plugin."
                )
        arguments["parallelism_config"] = parallelism_config(config.ranks_per_replica)
    # The Accelerator does not exist yet: check the argument as `is_ours` would.
    has_layout = type(arguments.get("parallelism_config")).__name__ == "MegatronParallelismConfig"
    original(self, **_with_data(arguments) if has_layout else arguments)


def _with_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """Adds a data loader configuration that gives the ranks of a replica the same samples and other replicas others."""
    from accelerate.utils import DataLoaderConfiguration

    parallelism = arguments["parallelism_config"]
    # Accelerate's tp axis stands for all model-parallel ranks: tp x cp x pp.
    ranks_per_replica, dp_size = parallelism.tp_size, parallelism.dp_shard_size
    configuration = arguments.get("dataloader_config")
    if configuration is None:
        configuration = DataLoaderConfiguration()
    if ranks_per_replica > 1 and dp_size > 1:
        if configuration.dispatch_batches:
            raise UnsupportedError(
                f"dispatch_batches=True is not supported with {dp_size} data-parallel ranks and "
                f"{ranks_per_replica} ranks per replica: Accelerate would send the same batch to all of them. Leave it "
                "unset; each replica then reads its own batches."
            )
        # None means True for an IterableDataset.
        configuration = dataclasses.replace(configuration, dispatch_batches=False)
    arguments = arguments | {"dataloader_config": configuration}
    if dp_size == 1 and arguments.get("rng_types") is None:
        # Samplers may draw from torch's generator; with one dp rank upstream does not synchronize it.
        arguments["rng_types"] = ["torch", "generator"]
    return arguments


@contextmanager
def _compiling_layers(accelerator: Any, model: Any) -> Iterator[None]:
    """Compiles a parallelized model layer by layer, where Accelerate would compile the complete model inside."""
    plugin = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend
    if backend != DynamoBackend.NO:
        compile_layers(model, **plugin.to_kwargs())


def prepare_model(
    original: Callable,
    self: Any,
    model: Any,
    device_placement: Any = None,
    evaluation_mode: bool = False,
    **kwargs: Any,
) -> Any:
    """Prepares a parallelized model without wrapping it, or a module that wraps one; checks the layout."""
    from ...parallel_state import model_inside

    if (inner := model_inside(model)) is not model:
        return _prepare_around(original, self, model, inner, **kwargs)
    if _state(model) is not None:
        if not (evaluation_mode and _shares_batches(self, _state(model).config)):
            _require_fitting(self, model)
        # Upstream's evaluation mode applies mixed precision and skips DistributedDataParallel: gradients are reduced by
        # the model's own hooks.
        with _compiling_layers(self, model):
            return original(self, model, device_placement, True, **kwargs)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if RUNTIME.models and trained and not evaluation_mode:
        from .wrapped_models import model_to_prepare

        inner = model_to_prepare(model)
        if inner is not None:
            return _prepare_around(original, self, model, inner, **kwargs)
    if RUNTIME.launch is not None and not evaluation_mode:
        RUNTIME.launch.require_parallelized(model)
    # Upstream rejects a replicated model next to tensor-parallel ones unless it is in evaluation mode.
    return original(self, model, device_placement, evaluation_mode or (is_ours(self) and not trained), **kwargs)


def _prepare_around(original: Callable, self: Any, module: Any, model: Any, **kwargs: Any) -> Any:
    """Prepares a wrapper without weights of its own; the model inside is what is saved, loaded and counted."""
    _require_fitting(self, model)
    if getattr(module, "_is_accelerate_prepared", False):
        prepared = module
    else:
        prepared = original(self, module, False, True, **kwargs)
        # Upstream sets this mark on the models that it finds in its list.
        prepared._is_accelerate_prepared = True
    others = [other for other in self._models if other is not prepared and other is not model]
    self._models[:] = [*others, model]
    return prepared


def _require_fitting(self: Any, model: Any) -> None:
    """Raises if the Accelerator's layout differs from the model's, and passes its loss scale to the pipeline."""
    state = _state(model)
    if not is_ours(self):
        raise ConfigError(
            "This Accelerator was created before the model was loaded with megatron_config, so it does not know which "
            "ranks share batches and gradients. Create it after the model, pass it "
            "megatron_lm_plugin=MegatronPlugin(...), or launch with an accelerate YAML of type MEGATRON_LM, in a new "
            "process, because Accelerate keeps the layout of the first Accelerator."
        )
    _require_same_layout(self, state.config)
    if state.pipeline is not None and self.scaler is not None:
        # Factor that `backward` applies to a loss, unless the loop scales the loss itself.
        state.pipeline.loss_scale.usual = lambda: self.scaler.get_scale() / self.gradient_accumulation_steps


def _shares_batches(accelerator: Any, layout: MegatronConfig) -> bool:
    """Returns whether the Accelerator gives all ranks of an inference-only model's replica the same batch."""
    return is_ours(accelerator) and ranks_of_replica(accelerator) % layout.ranks_per_replica == 0


def _require_same_layout(accelerator: Any, config: MegatronConfig) -> None:
    """Raises if the Accelerator was set up for another layout than the model's."""
    ranks = ranks_of_replica(accelerator)
    if config.ranks_per_replica != ranks:
        raise ConfigError(
            f"The model was loaded with {config.ranks_per_replica} ranks per replica (tp_size x cp_size x pp_size), "
            f"but this Accelerator was created for {ranks}. Pass the same MegatronConfig to both, or create it after "
            "the model in a new process, because Accelerate keeps the layout of the first Accelerator."
        )
    plugin = getattr(accelerator, "_hf_megatron_plugin", None)
    loaded = config.to_dict()
    # Filled in at loading, from the number of ranks and of heads.
    filled = ["dp_size", *(name for name in _FILLED_AT_LOADING if plugin is not None and getattr(plugin, name) is None)]
    expected = {} if plugin is None else plugin.to_dict() | {name: loaded[name] for name in filled}
    if differing := [f"{k} = {loaded[k]!r} (plugin: {value!r})" for k, value in expected.items() if value != loaded[k]]:
        raise ConfigError(
            f"The model was loaded with {', '.join(differing)}. Load it with the plugin's config: "
            "megatron_config=plugin.config."
        )


def prepare_tp(original: Callable, self: Any, *args: Any) -> Any:
    """Skips upstream's preparation for TP, which would put the model's DTensors back into the optimizer's groups."""
    return list(args) if is_ours(self) else original(self, *args)


def reject_local_sgd(
    original: Callable, self: Any, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True
) -> None:
    """Rejects LocalSGD on several replicas, whose gradients are averaged in every step."""
    if enabled and is_ours(accelerator) and replicas(accelerator) > 1:
        raise UnsupportedError(
            f"LocalSGD is not supported on {replicas(accelerator)} data-parallel ranks: their gradients are averaged "
            "in every step, so it would have no effect. Pass enabled=False."
        )
    original(self, accelerator, model, local_sgd_steps, enabled)


def prepare_scheduler(original: Callable, self: Any, scheduler: Any) -> Any:
    """Prepares a scheduler that steps once per replica instead of once per rank."""
    prepared = original(self, scheduler)
    if not is_ours(self) or prepared is scheduler:
        return prepared
    self._schedulers[-1] = SchedulerOfReplicas(prepared, replicas(self))
    return self._schedulers[-1]


def clip_grad_norm_(original: Callable, self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
    """Clips the gradients of parameters, of any shape, by the norm over the full model."""
    if not is_ours(self):
        return original(self, parameters, max_norm, norm_type=norm_type)
    from ...data_parallel.grad_norm import clip_grad_norm

    self.unscale_gradients()
    return clip_grad_norm(parameters, max_norm, norm_type)


def get_state_dict(original: Callable, self: Any, model: Any, unwrap: bool = True) -> Any:
    """Returns the full state dict on rank 0 and an empty one on other ranks."""
    if not RUNTIME.models:
        return original(self, model, unwrap)
    from .wrapped_models import full_state_dict_around

    state_dict = full_state_dict_around(model)
    return original(self, model, unwrap) if state_dict is None else state_dict


class SchedulerOfReplicas(AcceleratedScheduler):
    """A prepared stock scheduler that steps once per replica, and once per step where batches are split."""

    def __init__(self, stock: AcceleratedScheduler, replicas: int):
        super().__init__(stock.scheduler, stock.optimizers, stock.step_with_optimizer, split_batches=True)
        self._is_accelerate_prepared = True
        self.steps = 1 if stock.split_batches or not stock.step_with_optimizer else replicas

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler if the optimizer has stepped."""
        for _ in range(self.steps if self.gradient_state.sync_gradients else 1):
            if isinstance(self.scheduler, OneCycleLR) and self.scheduler._step_count > self.scheduler.total_steps:
                return
            super().step(*args, **kwargs)
