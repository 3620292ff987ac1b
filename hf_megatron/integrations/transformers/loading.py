"""`from_pretrained(..., megatron_config=...)`, `from_config(..., megatron_config=...)` and what such a model does anew.

Every replacement passes models through untouched that were loaded without the argument.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from ...checkpoint.initialize import initialize_missing
from ...checkpoint.merged_export import save_merged
from ...checkpoint.strict_loading import check_loaded, own_memory
from ...compat.patch_registry import PATCH_REGISTRY
from ...compat.transformers_loading import forget_conversions, quiet_loading
from ...compat.versions import __version__, warn_of_unchecked_versions
from ...config import MegatronConfig, validate_world_size
from ...core.axes import Axes
from ...core.communication.full_tensor import accept_full_tensors
from ...core.communication.rank_errors import agree, gather, propagate_errors
from ...core.memory.activation_offload import offload_inputs
from ...core.memory.recompute import apply_recompute
from ...core.memory.tiled_mlp import tile_mlps
from ...core.runtime import RUNTIME
from ...errors import ConfigError, UnsupportedError
from ...models.fingerprint import describe_model
from ...models.layers import LayerSequence
from ...parallel_state import ParallelState, model_inside, parallel_state
from ...parallelize import install, parallel_hooks, parallel_plan, place, plan
from ...tensor_parallel.grouped_gemm import require_expert_widths
from ..accelerate.environment import job_world_size
from ..accelerate.process_group import ensure_process_group
from ..hub.hooks import check_part, push_saved
from .checkpoint_formats import opened, save_in_format
from .model_cards import write_model_card
from .quantization import finish_quantization, plan_quantization, quantize_arrived, requested, require_dense
from .verification_gate import require_verified, with_compared_scheme
from .weight_conversion import own_part, read_full, stop_reading

# Arguments of from_pretrained that lay the model out in another way.
_EXCLUSIVE = {
    "distributed_config": "it is transformers' own layout; drop one of the two",
    "device_map": "each rank holds its shard on its own device; drop device_map",
    "tp_plan": "the plan comes from hf_megatron's registry; drop tp_plan",
    "tp_size": "state it in megatron_config instead",
    "gguf_file": "GGUF weights are not split; convert the file to safetensors first",
}


@dataclass(frozen=True)
class _Request:
    """What travels through transformers' loader in the place of a config of its own layouts."""

    config: MegatronConfig
    quantizer: Any = None

    def to_dict(self) -> dict[str, Any]:
        return self.config.to_dict()


def _activate_patches() -> None:
    """Applies the patches that a layout needs.

    Raises:
        ConfigError: a trainer is loading the model in its constructor, which has begun as upstream's own.
    """
    if PATCH_REGISTRY.is_active:
        return
    PATCH_REGISTRY.activate()
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__init__" and isinstance(owner := frame.f_locals.get("self"), transformers.Trainer):
            raise ConfigError(
                f"{type(owner).__name__} loads a model with megatron_config in its constructor. Load the model first "
                "and pass it instead of model_init, or give model_init_kwargs to the constructor of the arguments."
            )


def _start(value: Any, kwargs: dict[str, Any]) -> MegatronConfig:
    """Validates the argument and the job before anything is loaded, and applies the patches that a layout needs."""
    _activate_patches()
    warn_of_unchecked_versions()
    config = MegatronConfig.coerce(value)
    for name, reason in _EXCLUSIVE.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name} = {kwargs[name]!r} beside megatron_config: {reason}.")
    return fit_for_one_rank(dataclasses.replace(config, dp_size=validate_world_size(config, job_world_size())))


def from_pretrained(
    original: Callable,
    cls: Any,
    pretrained_model_name_or_path: Any = None,
    *args: Any,
    megatron_config: Any = None,
    **kwargs: Any,
) -> Any:
    """Loads a model laid out as `megatron_config` says, or as the script's launch does, from any kind of checkpoint."""
    unsharded = functools.partial(original, cls, pretrained_model_name_or_path, *args)
    parallelized = functools.partial(_load, original, cls, pretrained_model_name_or_path, *args)
    if megatron_config is not None:
        return parallelized(megatron_config=megatron_config, **kwargs)
    return unsharded(**kwargs) if RUNTIME.launch is None else RUNTIME.launch.make(cls, parallelized, unsharded, kwargs)


def _load(original: Callable, cls: Any, path: Any, *args: Any, megatron_config: Any, **kwargs: Any) -> Any:
    config = _start(megatron_config, kwargs)
    quantizer = None
    if config.is_parallel:
        quantizer = requested(kwargs.pop("quantization_config", None))
    output_loading_info = kwargs.pop("output_loading_info", False)
    with opened(cls, path, kwargs, config) as source:
        arguments = {**kwargs, **source.arguments, "output_loading_info": True}
        if config.is_parallel:
            arguments = {"weights_only": True, **arguments, "distributed_config": _Request(config, quantizer)}
        with quiet_loading() if dist.is_initialized() and dist.get_rank() else contextlib.nullcontext():
            model, info = original(cls, source.path, *args, **arguments)
    source.complete(model)
    if arguments.get("state_dict") is not None:
        forget_conversions(model)
    if config.is_parallel:
        # Of a pipeline's weights a rank misses those of its own stages only.
        with propagate_errors(f"Loading {path}"):
            check_part(model, info, path)
            check_loaded(model, info, strict=config.strict_loading)
        _finish(model, quantizer)
    return (model, info) if output_loading_info else model


def auto_from_pretrained(
    original: Callable, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuses a layout that cannot be before the Auto classes read a config to find the class."""
    if kwargs.get("megatron_config") is not None:
        _start(kwargs["megatron_config"], kwargs)
    return original(cls, pretrained_model_name_or_path, *args, **kwargs)


def from_config(original: Callable, cls: Any, config: Any, *, megatron_config: Any = None, **kwargs: Any) -> Any:
    """Makes a model laid out as `megatron_config` says, with the same global weights on every layout."""
    unsharded, parallelized = functools.partial(original, cls, config), functools.partial(_draw, original, cls, config)
    if megatron_config is not None:
        return parallelized(megatron_config=megatron_config, **kwargs)
    return unsharded(**kwargs) if RUNTIME.launch is None else RUNTIME.launch.make(cls, parallelized, unsharded, kwargs)


def _draw(original: Callable, cls: Any, config: Any, *, megatron_config: Any, **kwargs: Any) -> Any:
    layout = _start(megatron_config, kwargs)
    if not layout.is_parallel:
        return original(cls, config, **kwargs)
    dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None)) or config.dtype or torch.get_default_dtype()
    # No weights: the loader finds every parameter missing and has each drawn by `_initialize_missing_keys`.
    with quiet_loading():
        model = cls.from_pretrained.__func__.__wrapped__(
            cls, None, config=config, state_dict={}, dtype=dtype, distributed_config=_Request(layout), **kwargs
        )
    forget_conversions(model)
    _finish(model)
    return model.train()


def _finish(model: Any, quantizer: Any = None) -> None:
    """Has modules compute in parallel, now that the weights are in, and stock loops find what they ask a model for."""
    state = parallel_state(model)
    assert state is not None
    stop_reading(state)
    finish_quantization(model, quantizer, state)
    _keep_less(model, state)
    install(model)
    apply_recompute(model, state.config.recompute)
    model.register_load_state_dict_pre_hook(accept_full_tensors)
    for attribute, value in (
        ("parallel_plan", types.MethodType(parallel_plan, model)),
        ("parallel_hooks", types.MethodType(parallel_hooks, model)),
        ("_tp_size", state.config.ranks_per_replica),
        ("_tp_plan", {}),
        ("_is_distributed_loading_by_transformers", True),
    ):
        state.patches.replace(model, attribute, value)
    state.patches.replace(model.config, "distributed_config", state.config)


def _keep_less(model: Any, state: ParallelState) -> None:
    """Has layers work on some tokens at a time, and keep their inputs in CPU memory, where the config asks for it."""
    config = state.config
    if (tokens := config.mlp_chunk_size) is not None:
        found = [mlp for name in _lists_of(model, state, "mlp_chunk_size") for mlp in tile_mlps(model, name, tokens)]
        if not any(gather(bool(found), state.mesh.host_group("pp"), "Looking for MLPs on all stages")):
            raise UnsupportedError(
                f"MegatronConfig.mlp_chunk_size = {tokens}: the layers of {type(model).__name__} have no module that "
                "is an MLP and nothing else. Leave it out; recompute='full' keeps less too."
            )
    if config.offload_activations:
        for name in _lists_of(model, state, "offload_activations"):
            offload_inputs(model, name)


def _lists_of(model: Any, state: ParallelState, field: str) -> tuple[str, ...]:
    """Names the lists of a model's layers; raises as `LayerSequence.of`."""
    row = LayerSequence.of(model, state.spec, field) if state.cut is None else state.cut.layers
    return row.lists


def prepare_distribute_model(original: Callable, cls: Any, distributed_config: Any, device_map: Any = None) -> Any:
    """Joins the job and returns this rank's device; the mesh is made when the model exists."""
    if not isinstance(distributed_config, _Request):
        return original(cls, distributed_config, device_map=device_map)
    return distributed_config, ensure_process_group(distributed_config.config.timeout), None


def maybe_distribute_model(original: Callable, cls: Any, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
    """Splits the model, on the meta device, by its own plan, once all ranks agree and the layout is verified."""
    if not isinstance(distributed_config, _Request):
        return original(cls, model, distributed_config, mesh_manager)
    request, distributed_config = distributed_config, distributed_config.config
    model.config.distributed_config = distributed_config
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise UnsupportedError(
            "The checkpoint is quantised (quantization_config in its config.json); load the one that it was made of, "
            "with quantization_config= beside megatron_config=."
        )
    description = describe_model(model)
    distributed_config = with_compared_scheme(model, distributed_config, description)
    agree(_facts(model, distributed_config))
    # What cannot be laid out says why; only what could be is asked whether anybody compared it.
    axes = Axes.of(distributed_config, dist.get_rank())
    state = plan(model, distributed_config, axes, is_quantized=request.quantizer is not None)
    require_expert_widths(model, state.shardings, state.axes)
    require_verified(model, state, description)
    if request.quantizer is not None:
        plan_quantization(model, request.quantizer, state)
    # A dry run's ranks have none, whatever this machine has.
    on_cpu = not torch.cuda.is_available() or dist.get_backend() in ("gloo", "fake")
    place(model, state, "cpu" if on_cpu else "cuda")
    read_full(model, state)
    return model


def _facts(model: Any, config: MegatronConfig) -> dict[str, Any]:
    """Returns what has to be the same on every rank, by the name an error gives it."""
    described = json.loads(model.config.to_json_string(use_diff=False))
    versions = {"hf_megatron": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        **{f"the version of {name}": version for name, version in versions.items()},
        **{f"MegatronConfig.{name}": value for name, value in config.to_dict().items()},
        **{f"the model's config.{name}": value for name, value in described.items()},
        "the model's class": type(model).__name__,
    }


def gather_sharded_state_dict_for_save(
    original: Callable, self: Any, model_to_save: Any, state_dict: dict, distributed_config: Any, **kwargs: Any
) -> dict:
    """Leaves the weights of a laid out model to `save_merged`."""
    if isinstance(distributed_config, MegatronConfig):
        return state_dict
    return original(self, model_to_save, state_dict, distributed_config, **kwargs)


def barrier_after_gathered_checkpoint_save(original: Callable, self: Any, distributed_config: Any) -> None:
    """Waits for nobody: a laid out model's weights are not written yet, and whoever writes them waits afterwards."""
    if not isinstance(distributed_config, MegatronConfig):
        original(self, distributed_config)


def get_model_param_count(original: Callable, model: Any, trainable_only: bool = False) -> int:
    """Counts the parameters of all stages; every rank calls it."""
    state = parallel_state(model)
    if state is None or state.pipeline is None:
        return original(model, trainable_only)
    return model_inside(model).num_parameters(only_trainable=trainable_only)


def add_unmatched_checkpoint_key(original: Callable, key: str, model: Any, loading_info: Any) -> None:
    """Reports a weight of a checkpoint that the model has not, unless another stage of the pipeline has it."""
    state = parallel_state(model)
    off_stage_names = frozenset() if state is None or state.cut is None else state.names.off_stage
    prefix = f"{model.base_model_prefix}."
    # As the loader does with names of this stage: a base model reads files of classes with a head, and they read its.
    if off_stage_names.isdisjoint((key, prefix + key, key.removeprefix(prefix))):
        original(key, model, loading_info)


def set_param_for_module(
    original: Callable, model: Any, target_name: str, param_value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Sets a weight, this rank's part of any shape, from memory that training may write to."""
    state = parallel_state(model)
    if state is not None:
        param_value = own_part(model, state, target_name, param_value)
        # FSDP2 copies its part of what stays mapped until then.
        if not state.shards_weights:
            param_value = own_memory(param_value)
    result = original(model, target_name, param_value, *args, **kwargs)
    quantize_arrived(model, target_name)
    return result


def initialize_missing_keys(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws the weights that no file has, the same global ones on every layout."""
    state = parallel_state(self)
    if state is None:
        return original(self, *args, **kwargs)
    named = dict(self.named_parameters(remove_duplicate=False))
    missing = {name for name, parameter in named.items() if not getattr(parameter, "_is_hf_initialized", False)}
    for name in named.keys() - missing:
        # A weight of a file is trained also where the class froze it: the loader puts a new one in its place, but for a
        # split one, which it has follow the old.
        if isinstance(named[name], DTensor) and named[name].is_floating_point():
            named[name].requires_grad_(True)
    initialize_missing(self, state, missing)
    result = original(self, *args, **kwargs)
    # What was drawn may be drawn again, by `apply(model._init_weights)`.
    for name in missing:
        vars(self.get_parameter(name)).pop("_is_hf_initialized", None)
    return result


def save_pretrained(
    original: Callable, self: Any, save_directory: Any, *args: Any, format: str = "hf", **kwargs: Any
) -> Any:
    """Saves merged Hugging Face files with a card, or another format; every rank calls it."""
    require_dense(self)
    if format != "hf":
        PATCH_REGISTRY.activate()
        return save_in_format(self, original, save_directory, format, *args, **{"options": None, **kwargs})
    if "options" in kwargs:
        raise ConfigError("save_pretrained(options=...): Hugging Face files have none; give format= too.")
    if parallel_state(self) is None:
        return original(self, save_directory, *args, **kwargs)
    card = functools.partial(write_model_card, self, repo_id=kwargs.get("repo_id"))
    return save_merged(self, original, save_directory, *args, before_push=card, push=push_saved, **kwargs)


def resize_token_embeddings(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses a laid out model, of whose rows this rank has a part."""
    if parallel_state(self) is not None:
        raise UnsupportedError(
            f"{type(self).__name__}.resize_token_embeddings on a model that is split over ranks: load it in one "
            "process, resize, save, and load the result with megatron_config."
        )
    return original(self, *args, **kwargs)


_OF_ROUTERS = ("router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate", "router_replay")


def fit_for_one_rank(config: MegatronConfig) -> MegatronConfig:
    """Returns the layout; raises `ConfigError` for settings by which several ranks train otherwise than one."""
    default = MegatronConfig()
    for name in _OF_ROUTERS:
        value, stock = getattr(config, name), getattr(default, name)
        if value != stock and not config.is_parallel:
            raise ConfigError(
                f"MegatronConfig.{name} = {value!r} in a job of one rank, whose models are transformers' own: it would "
                "train otherwise than a job of several. Run it on two ranks or more (dp_size), or leave "
                f"{name} at {stock!r}."
            )
    return config
