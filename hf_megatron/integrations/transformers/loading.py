"""`from_pretrained(..., megatron_config=...)` and `from_config(..., megatron_config=...)`, in the order of execution.

    1. validate   arguments and job, once, before anything is read
    2. open       the checkpoint's format; transformers' loader is called with a `LoadRequest`
    3. join       prepare_distribute_model: the process group and this rank's device
    4. shard      maybe_distribute_model: the meta model is compared, planned, verified and placed (`parallelize.py`)
    5. fill       set_param_for_module: each rank's shards of the weights; initialize_missing_keys: those in no file
    6. check      missing and unexpected weights, on all ranks together
    7. finish     the model computes in parallel

Every replacement leaves models alone that were loaded without the argument.
"""

import contextlib
import copy
import dataclasses
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...checkpoint.collected_state import collect_state_dict, follow_weights
from ...checkpoint.initialize import initialize_missing
from ...checkpoint.strict_loading import check_loaded, own_memory
from ...compat.patch_registry import PATCH_REGISTRY
from ...compat.transformers_loading import forget_conversions, quiet_loading
from ...compat.versions import warn_unchecked_versions
from ...config import MegatronConfig, validate_world_size
from ...core.communication.full_tensor import accept_full_tensors
from ...core.communication.rank_errors import gather, propagate_errors
from ...core.memory.activation_offload import offload_inputs
from ...core.memory.recompute import apply_recompute
from ...core.memory.tiled_mlp import tile_mlps
from ...core.runtime import RUNTIME
from ...data_parallel.unprepared_steps import expect_main_params
from ...errors import ConfigError, UnsupportedError
from ...models.layers import LayerSequence
from ...parallel_state import ParallelState, parallel_state
from ...parallelize import install, parallel_hooks, parallel_plan, place, plan_verified
from ...pipeline_parallel.off_stage_module import Placeholder
from ..accelerate.environment import job_world_size
from ..accelerate.process_group import ensure_process_group
from ..accelerate.replicas import announce_replicas
from ..hub.hooks import check_part
from ..peft.loading import find_adapter_base
from .checkpoint_formats import opened
from .hub_kernels import take_kernel_config
from .quantization import finish_quantization, plan_quantization, quantize_arrived, requested
from .weight_conversion import expose_full_tensors, own_part, stop_exposing_full_tensors

# Arguments of from_pretrained that cannot be combined with megatron_config, and why.
_EXCLUSIVE = {
    "distributed_config": "it is transformers' own layout; drop one of the two",
    "device_map": "each rank holds its shard on its own device; drop device_map",
    "tp_plan": "the plan comes from hf_megatron's registry; drop tp_plan",
    "tp_size": "state it in megatron_config instead",
    "gguf_file": "GGUF weights are not split; convert the file to safetensors first",
}
# Settings by which a job of several ranks trains differently than a stock model.
_ROUTER_SETTINGS = ("router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate", "router_replay")


@dataclass(frozen=True)
class ValidatedConfig:
    """A `megatron_config` that an Auto class has validated before it read the model's config."""

    config: MegatronConfig


@dataclass(frozen=True)
class LoadRequest:
    """Passed to the transformers loader instead of a `DistributedConfig`.

    Attributes:
        config (`MegatronConfig`): the validated configuration.
        quantizer (*optional*): transformers' quantizer of `quantization_config`.
        create_stock_model (`Callable`, *optional*): creates the full model as a single process would.
    """

    config: MegatronConfig
    quantizer: Any = None
    create_stock_model: Callable[[], Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return self.config.to_dict()


# 1. Validate


def auto_from_pretrained(
    original: Callable, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
) -> Any:
    """Validates `megatron_config` before an Auto class reads the model's config to find the model's class."""
    if kwargs.get("megatron_config") is not None:
        kwargs["megatron_config"] = ValidatedConfig(_validate(kwargs["megatron_config"], kwargs))
    return original(cls, pretrained_model_name_or_path, *args, **kwargs)


def from_pretrained(
    original: Callable,
    cls: Any,
    pretrained_model_name_or_path: Any = None,
    *args: Any,
    megatron_config: Any = None,
    **kwargs: Any,
) -> Any:
    """Loads a model parallelized by `megatron_config`, or by the script's launch, from any checkpoint format."""

    def load_unsharded(**kwargs: Any) -> Any:
        return original(cls, pretrained_model_name_or_path, *args, **kwargs)

    def load_parallelized(*, megatron_config: Any, **kwargs: Any) -> Any:
        config = _validate(megatron_config, kwargs)
        return _load(original, cls, config, pretrained_model_name_or_path, *args, **kwargs)

    if megatron_config is not None:
        return load_parallelized(megatron_config=megatron_config, **kwargs)
    if RUNTIME.launch is not None:
        return RUNTIME.launch.make(cls, load_parallelized, load_unsharded, kwargs)
    return load_unsharded(**kwargs)


def from_config(original: Callable, cls: Any, config: Any, *, megatron_config: Any = None, **kwargs: Any) -> Any:
    """Creates a model parallelized by `megatron_config`, with the same global weights on every layout."""

    def create_unsharded(**kwargs: Any) -> Any:
        return original(cls, config, **kwargs)

    def create_parallelized(*, megatron_config: Any, **kwargs: Any) -> Any:
        layout = _validate(megatron_config, kwargs)
        if not layout.is_parallel:
            return _with_optimizer_check(create_unsharded(**kwargs), layout)
        return _initialize(cls, config, layout, _in_current_state(original, cls, config, kwargs), **kwargs)

    if megatron_config is not None:
        return create_parallelized(megatron_config=megatron_config, **kwargs)
    if RUNTIME.launch is not None:
        return RUNTIME.launch.make(cls, create_parallelized, create_unsharded, kwargs)
    return create_unsharded(**kwargs)


def _with_optimizer_check(model: Any, layout: MegatronConfig) -> Any:
    """Returns the stock model of a job of one rank, whose optimizer has no fp32 main params."""
    if layout.fp32_main_params:
        expect_main_params(model.parameters())
    return model


def _validate(value: Any, kwargs: dict[str, Any]) -> MegatronConfig:
    """Returns the configuration with all sizes set; applies the patches that it needs.

    Raises:
        ConfigError: if a field, or the number of ranks, is invalid.
        UnsupportedError: if another argument excludes `megatron_config`.
    """
    if isinstance(value, ValidatedConfig):
        return value.config
    _activate_patches()
    warn_unchecked_versions()
    config = MegatronConfig.coerce(value)
    for name, reason in _EXCLUSIVE.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name} = {kwargs[name]!r} together with megatron_config: {reason}.")
    config = dataclasses.replace(config, dp_size=validate_world_size(config, job_world_size()))
    if not config.is_parallel:
        _reject_router_settings(config)
    return config


def _activate_patches() -> None:
    """Applies the patches that parallelized models need.

    Raises:
        ConfigError: if a trainer loads the model in its constructor, which has started without the patches.
    """
    if PATCH_REGISTRY.is_active:
        return
    PATCH_REGISTRY.activate()
    # `transformers.Trainer` would import the trainer, and with it datasets, PEFT and more: 150 MiB per process.
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame = sys._getframe(1)
    while trainer is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__init__" and isinstance(owner := frame.f_locals.get("self"), trainer):
            raise ConfigError(
                f"{type(owner).__name__} loads a model with megatron_config in its constructor. Load the model first "
                "and pass it instead of model_init, or give model_init_kwargs to the constructor of the arguments."
            )


def _reject_router_settings(config: MegatronConfig) -> None:
    """Raises `ConfigError` for settings that a job of one rank, which loads a stock model, would ignore."""
    default = MegatronConfig()
    for name in _ROUTER_SETTINGS:
        value, stock = getattr(config, name), getattr(default, name)
        if value != stock:
            raise ConfigError(
                f"MegatronConfig.{name} = {value!r} in a job of one rank, which trains a stock model and would ignore "
                f"it. Use two or more ranks (dp_size), or leave {name} at {stock!r}."
            )


# 2. Open


def _load(original: Callable, cls: Any, layout: MegatronConfig, path: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Loads a checkpoint of any format through transformers' loader."""
    quantizer, load_adapter, ignore_mismatched, kernels = None, None, False, None
    if layout.is_parallel:
        kernels = take_kernel_config(kwargs)
        path, load_adapter = find_adapter_base(path, kwargs)
        quantizer = requested(kwargs.pop("quantization_config", None))
    output_loading_info = kwargs.pop("output_loading_info", False)
    with opened(cls, path, kwargs, layout) as source:
        arguments = {**kwargs, **source.arguments, "output_loading_info": True}
        if layout.is_parallel:
            arguments = {"weights_only": True, **arguments, "distributed_config": LoadRequest(layout, quantizer)}
            # `check_loaded` reports mismatched shapes on all ranks, unless the caller ignores them.
            ignore_mismatched = bool(arguments.get("ignore_mismatched_sizes"))
            arguments["ignore_mismatched_sizes"] = True
        with quiet_loading() if dist.is_initialized() and dist.get_rank() else contextlib.nullcontext():
            # Steps 3 to 5 run inside.
            model, info = original(cls, source.path, *args, **arguments)
    source.complete(model)
    if arguments.get("state_dict") is not None:
        forget_conversions(model)
    if layout.is_parallel:
        # 6. Check. Each rank of a pipeline knows only of its own stages' weights, so errors are shared.
        with propagate_errors(f"Loading {path}"):
            check_part(model, info, path)
            check_loaded(model, info, strict=layout.strict_loading, ignore_mismatched=ignore_mismatched)
        _finish(model, quantizer)
        if kernels is not None:
            model.set_use_kernels(True, kernels)
        if load_adapter is not None:
            load_adapter(model)
    else:
        _with_optimizer_check(model, layout)
    return (model, info) if output_loading_info else model


def _in_current_state(original: Callable, cls: Any, config: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that creates the stock model from the present state of torch's generator."""
    random_state, arguments = torch.get_rng_state(), dict(kwargs)

    def create_stock_model() -> Any:
        torch.set_rng_state(random_state)
        return original(cls, copy.deepcopy(config), **arguments)

    return create_stock_model


def _initialize(
    cls: Any, config: Any, layout: MegatronConfig, create_stock_model: Callable[[], Any], /, **kwargs: Any
) -> Any:
    """Creates a model with random weights through transformers' loader."""
    # Ranks of a dry run cannot receive weights.
    is_dry = dist.is_initialized() and dist.get_backend() == "fake"
    request = LoadRequest(layout, create_stock_model=None if is_dry else create_stock_model)
    dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None)) or config.dtype or torch.get_default_dtype()
    # The loader gets no weights, so it finds all parameters missing: `initialize_missing_keys` draws them.
    with quiet_loading():
        model = cls.from_pretrained.__func__.__wrapped__(
            cls, None, config=config, state_dict={}, dtype=dtype, distributed_config=request, **kwargs
        )
    forget_conversions(model)
    _finish(model)
    return model.train()


# 3. Join


def prepare_distribute_model(original: Callable, cls: Any, distributed_config: Any, device_map: Any = None) -> Any:
    """Joins the job and returns this rank's device; the mesh is created later, for the model."""
    if not isinstance(distributed_config, LoadRequest):
        return original(cls, distributed_config, device_map=device_map)
    return distributed_config, ensure_process_group(distributed_config.config.timeout), None


# 4. Shard


def maybe_distribute_model(original: Callable, cls: Any, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
    """Shards a model on the meta device."""
    if not isinstance(distributed_config, LoadRequest):
        return original(cls, model, distributed_config, mesh_manager)
    request = distributed_config
    model.config.distributed_config = request.config
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise UnsupportedError(
            "The checkpoint is quantized (quantization_config in its config.json). Load the checkpoint that it was "
            "made from, with quantization_config= and megatron_config=."
        )
    state = plan_verified(model, request.config, is_quantized=request.quantizer is not None)
    state.create_stock_model = request.create_stock_model
    if request.quantizer is not None:
        plan_quantization(model, request.quantizer, state)
    place(model, state, _device_type())
    expose_full_tensors(model, state)
    return model


def _device_type() -> str:
    """Returns the type of device that holds this rank's weights."""
    if dist.get_backend() == "fake":
        # Ranks of a dry run have no device, whatever this machine has; benchmarks choose one (`join_as_fake_rank`).
        group, device_type = RUNTIME.fake_job or (None, "cpu")
        return device_type if group is dist.group.WORLD else "cpu"
    return "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"


# 5. Fill


def add_unmatched_checkpoint_key(original: Callable, key: str, model: Any, loading_info: Any) -> None:
    """Reports an unexpected weight of a checkpoint, unless another pipeline stage holds it."""
    state = parallel_state(model)
    off_stage_names = frozenset() if state is None or state.cut is None else state.names.off_stage
    prefix = f"{model.base_model_prefix}."
    # Match names with and without the base-model prefix, as the loader does.
    if off_stage_names.isdisjoint((key, prefix + key, key.removeprefix(prefix))):
        original(key, model, loading_info)


def set_param_for_module(
    original: Callable, model: Any, target_name: str, param_value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Sets this rank's shard of a weight, of any shape, in memory that training may write to."""
    state = parallel_state(model)
    if state is not None:
        param_value = own_part(model, state, target_name, param_value)
        # FSDP2 copies its shard itself, from memory that may stay mapped until then.
        if not state.shards_weights:
            param_value = own_memory(param_value)
    result = original(model, target_name, param_value, *args, **kwargs)
    quantize_arrived(model, target_name)
    return result


def initialize_missing_keys(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws the weights that no file has, with the same global values on every layout."""
    state = parallel_state(self)
    if state is None:
        return original(self, *args, **kwargs)
    named = dict(self.named_parameters(remove_duplicate=False))
    missing = {name for name, parameter in named.items() if not getattr(parameter, "_is_hf_initialized", False)}
    for parameter in named.values():
        # The loader replaces a parameter that the class froze with a trainable one, also if no file has it, but makes a
        # DTensor follow the old parameter.
        if isinstance(parameter, DTensor) and parameter.is_floating_point():
            parameter.requires_grad_(True)
    for module in self.modules():
        if isinstance(module, Placeholder):
            module.unfreeze()
    initialize_missing(self, state, missing)
    result = original(self, *args, **kwargs)
    # Users may draw these weights again with `model.apply(model._init_weights)`, which skips marked parameters.
    for name in missing:
        vars(self.get_parameter(name)).pop("_is_hf_initialized", None)
    return result


# 7. Finish


def _finish(model: Any, quantizer: Any = None) -> None:
    """Makes the loaded model compute in parallel, and sets attributes that stock training code reads."""
    state = parallel_state(model)
    assert state is not None
    state.create_stock_model = None
    stop_exposing_full_tensors(state)
    finish_quantization(model, quantizer, state)
    _enable_memory_savings(model, state)
    install(model)
    announce_replicas(state)
    apply_recompute(model, state.config.recompute)
    model.register_load_state_dict_pre_hook(accept_full_tensors)
    model.register_state_dict_post_hook(collect_state_dict)
    follow_weights(model)
    for attribute, value in (
        ("parallel_plan", types.MethodType(parallel_plan, model)),
        ("parallel_hooks", types.MethodType(parallel_hooks, model)),
        ("_tp_size", state.config.ranks_per_replica),
        ("_tp_plan", {}),
        ("_is_distributed_loading_by_transformers", True),
    ):
        state.patches.replace(model, attribute, value)
    state.patches.replace(model.config, "distributed_config", state.config)


def _enable_memory_savings(model: Any, state: ParallelState) -> None:
    """Enables chunked MLPs and activation offloading if configured."""
    config = state.config
    if (tokens := config.mlp_chunk_size) is not None:
        lists = _layer_lists(model, state, "mlp_chunk_size")
        tiled = [mlp for name in lists for mlp in tile_mlps(model, name, tokens)]
        if not any(gather(bool(tiled), state.mesh.host_group("pp"), "Looking for MLPs on all stages")):
            raise UnsupportedError(
                f"MegatronConfig.mlp_chunk_size = {tokens}: the layers of {type(model).__name__} have no separate MLP "
                "module. Leave it out, or use recompute='full'."
            )
    if config.offload_activations:
        for name in _layer_lists(model, state, "offload_activations"):
            offload_inputs(model, name)


def _layer_lists(model: Any, state: ParallelState, field: str) -> tuple[str, ...]:
    """Returns the names of a model's layer lists; raises as `LayerSequence.of` does."""
    layers = LayerSequence.of(model, state.spec, field) if state.cut is None else state.cut.layers
    return layers.lists
