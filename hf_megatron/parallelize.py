"""The one entry: a stock model on the meta device in, the same model laid out over the mesh out.

    plan     every parallel axis claims parameters and changes the meta model; no process group is needed
    place    puts DTensor placeholders in the place of this rank's parameters (before weights are read)
    install  every axis makes the filled model compute in parallel (after)

Between the last two, transformers' own loader, or `checkpoint.initialize`, fills each rank's shards.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .compat.patch_registry import PATCH_REGISTRY
from .compat.transformers_models import adds_router_loss, function_between_layers
from .config import MegatronConfig
from .context_parallel import axis as context_parallel
from .core.axes import Axes
from .core.forward_hooks import ForwardHooks
from .core.memory.training_kv_cache import leave_out_in_training, reject_cache
from .core.mesh import ParallelMesh
from .core.off_stage import local_named_parameters
from .core.placement import GradientRule, ParameterSharding, Placement, copies_of_model
from .data_parallel import axis as data_parallel
from .data_parallel.batch_norm import BatchNormGuard
from .data_parallel.dynamic_rope import DynamicRopeSync
from .data_parallel.packed_sequences import ForwardInputHook
from .errors import ConfigError, UnsupportedError
from .expert_parallel import axis as expert_parallel
from .losses.inline_losses import LossHooks
from .losses.token_loss import install_loss
from .models.registry import registered_spec, spec_for
from .models.spec import ModelSpec
from .models.type_facts import batch_coupling_reason
from .parallel_state import ParallelState, StagePartition, attach_state, parallel_state
from .pipeline_parallel import axis as pipeline_parallel
from .tensor_parallel import axis as tensor_parallel


class ParallelAxis(Protocol):
    """The face of a parallel axis: a folder's `axis.py`."""

    NAME: str

    def place(self, model: Any, state: ParallelState) -> None:
        """States in `state.claims` what the axis does to parameters, and takes away what this rank does not need."""

    def install(self, model: Any, state: ParallelState) -> None:
        """Makes a model whose weights are loaded compute over the axis."""


# In the order in which they wrap a model, the innermost first.
# What runs before a parallelized model's forward, in this order; features of other axes run after these.
ENTER_ORDER = (
    "user hook checks",  # context parallel: hooks of users that would see a part of each sequence
    "enabled",  # `hf_megatron.disable()` was not called since
    "loss function",  # the model's type of loss is the one it was loaded with
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
)
# What runs after it.
EXIT_ORDER = (
    "pending loss",  # full logits in evaluation; before FSDP2's own hook, the others after it
    "loss",
    "kv cache",
    "data parallel",
    "gradient watch",
    "active forward",
    "router logits",
    "sequence split",
    "forward input",
    "dynamic rope",
)

AXES: tuple[ParallelAxis, ...] = (data_parallel, tensor_parallel, expert_parallel, context_parallel, pipeline_parallel)


class ParallelPlan(list[ParameterSharding]):
    """The claims of a model, one row per parameter; prints as a table.

    Attributes:
        cut (*optional*): the pipeline stages, where there are several.
    """

    def __init__(self, shardings: Iterable[ParameterSharding] = (), cut: StagePartition | None = None):
        super().__init__(shardings)
        self.cut = cut

    def __str__(self) -> str:
        rows = [["parameter", "global shape", "style", "placement", "gradient"]]
        rows += [[c.name, str(list(c.shape)), c.style, str(c.placement), str(c.gradient)] for c in self]
        if self.cut is not None:
            stages = [self.cut.stages_of(sharding.name) for sharding in self]
            for row, cell in zip(rows, ["stage", *stages], strict=True):
                row.append(cell)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def plan(model: Any, config: MegatronConfig, axes: Axes, *, is_quantized: bool = False) -> ParallelState:
    """Claims a meta model's parameters and leaves what a rank holds, without process groups; raises as axes do.

    Args:
        is_quantized (`bool`): linears will hold codes, of which no rows are read apart.
    """
    mixing = batch_coupling_reason(model.config)
    if mixing is not None and max(axes.size("dp"), axes.size("pp")) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} on ranks or stages that see parts of a batch: {mixing}. Load it with dp_size=1 "
            "and pp_size=1."
        )
    if config.router_z_loss_coef and not adds_router_loss(model):
        raise ConfigError(
            f"MegatronConfig.router_z_loss_coef = {config.router_z_loss_coef}: {type(model).__name__} adds no router "
            "loss to its "
            "own. Load it with output_router_logits=True if it has one, or leave it 0."
        )
    # Where modules stay whole no plan is asked: any architecture will do.
    spec = spec_for(model) if axes.size("tp") > 1 else registered_spec(model) or ModelSpec(model.config.model_type)
    shardings = {
        name: ParameterSharding(name, tuple(parameter.shape), "replicated", Placement(), GradientRule())
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    hooks = ForwardHooks(ENTER_ORDER, EXIT_ORDER)
    state = ParallelState(config, axes, spec, shardings, hooks=hooks, is_quantized=is_quantized)
    for axis in AXES:
        axis.place(model, state)
    return state


def place(model: Any, state: ParallelState, device_type: str) -> None:
    """Places a planned meta model: parameters become placeholders of the same name and global shape."""
    PATCH_REGISTRY.activate()
    state.connect(ParallelMesh.of_job(state.axes, device_type))
    _hold_places(model, state)
    attach_state(model, state)


def install(model: Any) -> None:
    """Makes a placed and filled model compute in parallel."""
    state = parallel_state(model)
    assert state is not None
    state.loss = install_loss(model, state)
    hooks, is_pipelined = state.hooks, state.axes.size("pp") > 1
    LossHooks(state.loss, model, pipelined=is_pipelined, has_dtensors=state.has_dtensors).install(hooks)
    leave_out_in_training(model, hooks, pipelined=is_pipelined, always=state.axes.size("cp") > 1)
    if state.spec.tp.no_cache is not None and state.axes.size("tp") > 1:
        reject_cache(model, hooks, state.spec.tp.no_cache)
    for axis in AXES:
        axis.install(model, state)
    _wrap_between_layer_fns(model, state)
    assert state.data_parallel is not None
    state.data_parallel.callbacks.on_stepped.append(state.loss.end_step)
    ForwardInputHook(model, state).install()
    DynamicRopeSync(model, state).install(model)
    BatchNormGuard(model, state).install(hooks)


def _wrap_between_layer_fns(model: nn.Module, state: ParallelState) -> None:
    """Has what a loop adds to hidden states between layers see whole ones."""
    for layers in dict.fromkeys(name for name, _ in state.full_sequence_fns):
        owner = model.get_submodule(layers.rpartition(".")[0])
        if (function := function_between_layers(owner)) is None:
            continue
        name = function.__name__
        for on_full_sequence in (hand for other, hand in reversed(state.full_sequence_fns) if other == layers):
            function = on_full_sequence(function)
        state.patches.replace(owner, name, function)


def _hold_places(model: nn.Module, state: ParallelState) -> None:
    """Puts DTensors in the place of parameters; where modules stay whole, of the split ones only."""
    # Meshes are made by all ranks together, also for what only other stages hold.
    copies = copies_of_model(state.shardings.values(), state.axes)
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
    """Returns the claims of a model in the order of its parameters; `print` shows them as a table."""
    state = parallel_state(model)
    if state is None:
        raise ConfigError(
            "The model was loaded without megatron_config (or with all sizes 1): it has no parallel plan."
        )
    return ParallelPlan(state.shardings.values(), state.cut)


def parallel_hooks(model: Any) -> ForwardHooks:
    """Returns what runs before and after a model's forward, in order; `print` shows it as a table."""
    state = parallel_state(model)
    if state is None:
        raise ConfigError(
            "The model was loaded without megatron_config (or with all sizes 1): it has no parallel hooks."
        )
    return state.hooks


def local_numel(model: nn.Module) -> int:
    """Counts the parameter entries this rank holds."""
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
]
