"""Parallelizes a stock model.

    1. compare   ranks compare their versions, configurations and the model's class
    2. plan      every parallel axis shards parameters of the meta model; no process group is needed
    3. verify    the layout has a recorded parity result for this model
    4. place     this rank's parameters become DTensor placeholders, before weights are read
    5. fill      transformers' own loader, or `checkpoint.initialize`, fills each rank's shards
    6. install   every axis makes the loaded model compute in parallel

`plan_verified` does steps 1 to 3. Planning without a job (`hf-megatron plan`, pulls from the Hub) calls `plan` alone.
"""

import json
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .compat.patch_registry import PATCH_REGISTRY
from .compat.transformers_models import adds_router_loss, function_between_layers
from .compat.versions import __version__
from .config import MegatronConfig
from .context_parallel import axis as context_parallel
from .context_parallel.comm_type import with_scheme
from .core.axes import Axes
from .core.communication.rank_errors import agree
from .core.forward_hooks import ForwardHooks, HookOrder
from .core.memory.training_kv_cache import leave_out_in_training, reject_cache
from .core.mesh import ParallelMesh
from .core.off_stage import local_named_parameters
from .core.placement import GradientRule, ParameterSharding, Placement, count_shared_copies
from .data_parallel import axis as data_parallel
from .data_parallel.batch_norm import BatchNormGuard
from .data_parallel.dynamic_rope import DynamicRopeSync
from .data_parallel.output_checks import OutputComparison
from .data_parallel.packed_sequences import ForwardInputHook
from .errors import ConfigError, UnsupportedError
from .expert_parallel import axis as expert_parallel
from .losses.inline_losses import LossHooks
from .losses.liger_head import LIGER_HEAD, LigerHead
from .losses.script_losses import ScriptLossHooks
from .losses.token_loss import install_loss
from .models.fingerprint import describe_model
from .models.registry import registered_spec, spec_for
from .models.spec import ModelSpec
from .models.type_facts import batch_coupling_reason
from .models.verification_gate import choose_verified_scheme, require_verified
from .parallel_state import ParallelState, StagePartition, attach_state, parallel_state
from .pipeline_parallel import axis as pipeline_parallel
from .tensor_parallel import axis as tensor_parallel
from .tensor_parallel.grouped_gemm import require_expert_widths


class ParallelAxis(Protocol):
    """Interface of a parallel axis: the `axis.py` of its folder."""

    NAME: str

    def place(self, model: Any, state: ParallelState) -> None:
        """Writes the axis's shardings into `state.shardings`, and removes modules that this rank does not need."""

    def install(self, model: Any, state: ParallelState) -> None:
        """Makes a model with loaded weights compute over the axis."""


# Names of hooks that run before a parallelized model's forward, in this order; all others run after these.
ENTER_ORDER = (
    "user hook checks",  # context parallel: hooks of users that would see a part of each sequence
    "enabled",  # `hf_megatron.disable()` was not called since
    "output checks",  # whether this call is compared with the other ranks'
    LIGER_HEAD,  # its forward leaves the loss to the model's head
    "loss function",  # the model's type of loss is the one it was loaded with
    "script loss",  # labels and count of a loss that a script computes are plain tensors inside the model
    "loss",  # labels carry the denominator of the batch
    "kv cache",  # left out in training, before anything asks whether the call keeps one
    "data parallel",  # buckets are opened, edits of weights followed; before FSDP2 exchanges parameters
    "parameters",  # each one has a sharding and was loaded
    "active forward",  # modules may be called from here on
    "sequence ends",  # stacks of layers that a failed forward left are closed
    "pending loss",  # the head knows whether a loss is taken of its logits
    "outputs",  # asked for, and not to be had from one rank
    "rng",  # ranks that share a batch start from one state
    "replaced functions",  # of layers, by users
    "user hooks",  # are given full activations
    "sequence split",  # context parallel: the arguments of this call
    "forward input",  # masks and positions, looked at once
    "dynamic rope",  # the longest sequence of all ranks
    "batch norm",  # statistics of a part of the batch
    "router padding",  # tokens that statistics of routers leave out
)
# Names of hooks that run after the forward, in this order.
EXIT_ORDER = (
    "pending loss",  # full logits in evaluation; before FSDP2's own hook, the others after it
    "loss",
    "kv cache",
    "data parallel",
    "gradient watch",
    "output checks",
    "script loss",
    "active forward",
    "router logits",
    "sequence split",
    "forward input",
    "dynamic rope",
    "router padding",
    "rng",  # whether the forward drew random numbers
)

# Order of the hooks on one submodule, where several features have some.
MODULE_ORDER = HookOrder(
    enter=(
        "zero 3 unit",  # the model was called before; outside FSDP2's own hook
        "full-sequence region",  # gathers the sequence over tp for the hooks below
        "zero 3 weights",  # weights are unsharded; inside FSDP2's own hook
        "local arguments",  # of this rank's heads
        "partial heads",
        "partial sum",  # the gradient of the inputs is summed over tp
        "expert widths",
        "sequence parallel stack",  # splits the sequence at the first layer
        "per-token arguments",  # split like the hidden states
        "uniform region",  # shared random numbers, full input
        "full-sequence block",  # gathers the sequence over cp; innermost
        "replaced functions",
        "active forward",
        "sequence ends",
        "user hooks",
        "sequence split",
        "user hook checks",
        "router padding",
    ),
    exit=(
        "full-sequence block",
        "latent with rotary",
        "partial heads",
        "partial sum",
        "full-sequence region",
        "sequence parallel stack",
        "sequence ends",
        "active forward",
        "sequence split",
        "router padding",
    ),
    outside=frozenset({"zero 3 unit", "full-sequence region"}),
)

# In the order in which they wrap a model, the innermost first.
AXES: tuple[ParallelAxis, ...] = (data_parallel, tensor_parallel, expert_parallel, context_parallel, pipeline_parallel)


class ParallelPlan(list[ParameterSharding]):
    """Shardings of a model's parameters; prints as a table with one line per parameter.

    Attributes:
        cut (`StagePartition`, *optional*): the pipeline stages, if there are several.
    """

    def __init__(self, shardings: Iterable[ParameterSharding] = (), cut: StagePartition | None = None):
        super().__init__(shardings)
        self.cut = cut

    def __str__(self) -> str:
        rows = [["parameter", "global shape", "style", "placement", "gradient"]]
        rows += [[c.name, str(list(c.shape)), c.style, str(c.placement), str(c.gradient)] for c in self]
        if self.cut is not None:
            stages = [self.cut.describe_stages(sharding.name) for sharding in self]
            for row, cell in zip(rows, ["stage", *stages], strict=True):
                row.append(cell)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def plan_verified(model: Any, config: MegatronConfig, *, is_quantized: bool = False) -> ParallelState:
    """Plans a meta model on every rank of a job; collective.

    Args:
        model: on the meta device; modules of other pipeline stages are removed from it.
        config (`MegatronConfig`): with all sizes set.
        is_quantized (`bool`, defaults to `False`): as for `plan`.

    Raises:
        ConfigError: if ranks have different versions, configurations or models.
        PlanError, UnsupportedError: if an axis cannot shard the model.
        UnverifiedLayoutError: if no parity result covers the model on this layout.
    """
    # Planning removes modules that the verification compares.
    description = describe_model(model)
    # 1. Compare
    config = choose_verified_scheme(model, config, with_scheme(config, model.config), description)
    agree(_describe_job(model, config))
    # 2. Plan
    state = plan(model, config, Axes.of(config, dist.get_rank()), is_quantized=is_quantized)
    require_expert_widths(model, state.shardings, state.axes)
    # 3. Verify, after planning: a layout that cannot work at all raises the more useful error.
    require_verified(model, state, description)
    return state


def _describe_job(model: Any, config: MegatronConfig) -> dict[str, Any]:
    """Returns everything that has to be identical on all ranks, by its name in error messages."""
    described = json.loads(model.config.to_json_string(use_diff=False))
    versions = {"hf_megatron": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        **{f"the version of {name}": version for name, version in versions.items()},
        **{f"MegatronConfig.{name}": value for name, value in config.to_dict().items()},
        **{f"the model's config.{name}": value for name, value in described.items()},
        "the model's class": type(model).__name__,
    }


def plan(model: Any, config: MegatronConfig, axes: Axes, *, is_quantized: bool = False) -> ParallelState:
    """Plans the shardings of a meta model, without process groups.

    Args:
        model: on the meta device; modules of other pipeline stages are removed from it.
        axes (`Axes`): sizes and ranks of the mesh.
        is_quantized (`bool`, defaults to `False`): whether linears will hold quantized weights.

    Raises:
        ConfigError, PlanError, UnsupportedError: if an axis cannot shard the model.
    """
    mixing = batch_coupling_reason(model.config)
    if mixing is not None and max(axes.size("dp"), axes.size("pp")) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be split over data-parallel ranks or pipeline microbatches: {mixing}. Load "
            "it with dp_size=1 and pp_size=1."
        )
    if config.router_z_loss_coef and not adds_router_loss(model):
        raise ConfigError(
            f"MegatronConfig.router_z_loss_coef = {config.router_z_loss_coef}: {type(model).__name__} has no router "
            "loss to add to. Load it with output_router_logits=True if it supports it, or set router_z_loss_coef=0."
        )
    # Without tensor parallelism modules are not sharded: any architecture will do.
    spec = spec_for(model) if axes.size("tp") > 1 else registered_spec(model) or ModelSpec(model.config.model_type)
    shardings = {
        name: ParameterSharding(name, tuple(parameter.shape), "replicated", Placement(), GradientRule())
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    hooks = ForwardHooks(ENTER_ORDER, EXIT_ORDER, MODULE_ORDER)
    state = ParallelState(config, axes, spec, shardings, hooks=hooks, is_quantized=is_quantized)
    for axis in AXES:
        axis.place(model, state)
    return state


def place(model: Any, state: ParallelState, device_type: str) -> None:
    """Replaces a planned meta model's parameters with placeholders of the same name and global shape; collective."""
    PATCH_REGISTRY.activate()
    state.connect(ParallelMesh.get_or_create(state.axes, device_type))
    _create_placeholders(model, state)
    attach_state(model, state)


def install(model: Any) -> None:
    """Makes a model with loaded weights compute in parallel; collective."""
    state = parallel_state(model)
    assert state is not None
    state.loss = install_loss(model, state)
    hooks, is_pipelined = state.hooks, state.axes.size("pp") > 1
    LossHooks(state.loss, model, pipelined=is_pipelined, has_dtensors=state.has_dtensors).install(hooks)
    if state.loss.has_data_parallel:
        ScriptLossHooks().install(hooks)
    state.placed[LIGER_HEAD] = LigerHead(pipelined=is_pipelined)
    state.placed[LIGER_HEAD].install(hooks)
    leave_out_in_training(model, hooks, pipelined=is_pipelined, always=state.axes.size("cp") > 1)
    if state.spec.tp.no_cache is not None and state.axes.size("tp") > 1:
        reject_cache(model, hooks, state.spec.tp.no_cache)
    for axis in AXES:
        axis.install(model, state)
    _wrap_between_layer_fns(model, state)
    assert state.data_parallel is not None
    state.data_parallel.callbacks.on_stepped.append(state.loss.end_step)
    OutputComparison(model, state).install()
    ForwardInputHook(model, state).install()
    DynamicRopeSync(model, state).install(model)
    BatchNormGuard(model, state).install(hooks)


def _wrap_between_layer_fns(model: nn.Module, state: ParallelState) -> None:
    """Wraps functions that the model's loop applies to hidden states between layers: they get full sequences."""
    for layers in dict.fromkeys(name for name, _ in state.full_sequence_fns):
        owner = model.get_submodule(layers.rpartition(".")[0])
        if (function := function_between_layers(owner)) is None:
            continue
        name = function.__name__
        for on_full_sequence in (hand for other, hand in reversed(state.full_sequence_fns) if other == layers):
            function = on_full_sequence(function)
        state.patches.replace(owner, name, function)


def _create_placeholders(model: nn.Module, state: ParallelState) -> None:
    """Replaces parameters with DTensors; without tensor parallelism only the sharded ones."""
    # All ranks create all meshes, including those of other stages' parameters.
    copies = count_shared_copies(state.shardings.values(), state.axes)
    meshes = {sharding.placement: state.mesh.of(sharding.placement, copies) for sharding in state.shardings.values()}
    placeholders: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            placement = state.placement(f"{module_name}.{parameter_name}" if module_name else parameter_name)
            if state.axes.size("tp") == 1 and not placement.is_split:
                continue
            if id(parameter) not in placeholders:
                dtensor = distribute_tensor(
                    parameter.detach(),
                    meshes[placement],
                    placement.dtensor_placements(state.axes, copies),
                    src_data_rank=None,
                )
                placeholder = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
                for name, value in vars(parameter).items():
                    setattr(placeholder, name, value)
                placeholders[id(parameter)] = placeholder
            module._parameters[parameter_name] = placeholders[id(parameter)]


def parallel_plan(model: Any) -> ParallelPlan:
    """Returns the shardings of a model in the order of its parameters; `print` shows them as a table."""
    state = parallel_state(model)
    if state is None:
        raise ConfigError(
            "The model was loaded without megatron_config (or with all sizes 1): it has no parallel plan."
        )
    return ParallelPlan(state.shardings.values(), state.cut)


def parallel_hooks(model: Any) -> ForwardHooks:
    """Returns the hooks that run before and after a model's forward, in order; `print` shows them as a table."""
    state = parallel_state(model)
    if state is None:
        raise ConfigError(
            "The model was loaded without megatron_config (or with all sizes 1): it has no parallel hooks."
        )
    return state.hooks


def local_numel(model: nn.Module) -> int:
    """Returns the number of parameter elements on this rank."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for _, p in local_named_parameters(model))


__all__ = [
    "ParallelPlan",
    "ParallelState",
    "install",
    "local_numel",
    "parallel_hooks",
    "parallel_plan",
    "parallel_state",
    "place",
    "plan",
    "plan_verified",
]
