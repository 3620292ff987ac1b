"""Tensor and sequence parallelism: sharding plan of a model, and installation of the parallel modules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..compat.torch_modules import compile_locally
from ..core.communication.rng import TensorParallelRng
from ..core.off_stage import computes_here
from ..core.placement import ParameterSharding
from ..errors import UnsupportedError
from ..models.experts import find_experts, pointwise_moe_blocks
from ..models.layers import find_text_model, names_in_encoder
from ..models.spec import HeadBlock, ModelSpec, generic, lookup
from ..parallel_state import ParallelState
from .attention_heads import LocalArguments, give_sizes
from .forward_checks import OutputChecks, ParameterCheck
from .grouped_gemm import GroupedWidths, split_widths
from .head_sharded_blocks import divides, has_counted_heads, is_one_group, plan_head_weights
from .install_regions import Regions
from .layer_rng import SyncedRngState
from .linear import ParallelLinear
from .local_parameters import ActiveForwards, LocalParameters, read_locally
from .loss_mode import install_pending_loss
from .region import SEQUENCE_DIM
from .rng_observer import RngObserver
from .sharding_rules import assign_shardings, expand_plan, expand_regions, local_sizes, matching, shared_heads
from .structure import Structure, find_structure, uniform_row
from .styles import AXIS, ModuleContext, style
from .unsharded_head import chunks_loss, install_unsharded_head, require_plain_head
from .user_hooks.hooks import UserHooks
from .user_hooks.module_calls import CallsInHooks
from .user_hooks.module_layouts import Activations
from .user_hooks.replaced_functions import ExchangedFunctions

NAME = AXIS
REGIONS = "regions"
FORWARDS = "forwards"
# User-hook checks, registered by every axis that shards activations.
GUARDS = "guards"


@dataclass(frozen=True)
class TensorPlan:
    """Tensor parallel plan of a model.

    Attributes:
        styles: module or parameter -> name of its style.
        structure: blocks and layer stacks at whose ends activations change their layout.
        head_copies: linear that makes heads -> number of neighboring ranks that hold the same shard of it.
        local_sizes: module -> attributes that count heads or widths, with this rank's values.
        sequence_sharded_moe: MoE blocks that run on the local shard of the sequence.
        heads: head-sharded block -> its description.
    """

    styles: Mapping[str, str]
    structure: Structure
    head_copies: Mapping[str, int]
    local_sizes: Mapping[str, Mapping[str, int]]
    sequence_sharded_moe: frozenset[str] = frozenset()
    heads: Mapping[str, HeadBlock] = field(default_factory=dict)


def place(model: Any, state: ParallelState) -> None:
    """Assigns a sharding to every parameter of a meta-device model, from the spec of its type.

    Raises `PlanError` for rules that do not fit the model, `ConfigError` for heads that cannot be split over tp_size,
    `UnsupportedError` for a type without sequence parallelism.
    """
    tp_size, spec, sequence_parallel = state.axes.size(AXIS), state.spec, state.config.sequence_parallel
    if tp_size == 1:
        require_plain_head(model, state)
        return
    if sequence_parallel and spec.sp.no_sequence_parallel is not None:
        raise UnsupportedError(
            f"model type {spec.model_type!r} does not support sequence parallelism: {spec.sp.no_sequence_parallel} "
            "Set sequence_parallel=False."
        )
    styles = expand_plan(model, spec)
    # Expert parallelism keeps each expert unsharded on its rank, so tp rules of modules inside experts are dropped.
    experts = find_experts(model, spec) if state.config.ep_size > 1 and state.axes.size("etp") == 1 else {}
    styles = {name: of for name, of in styles.items() if not _is_inside(name, experts)}
    # One style for the whole module: `expert_parallel` places all parameters inside it.
    styles |= dict.fromkeys(experts, "expert_parallel")
    modules = dict(model.named_modules())
    heads = {} if state.is_quantized else _find_head_blocks(model, spec, styles, tp_size)
    styles |= _plan_head_blocks(modules, heads)
    # Fail on modules that a style does not support before any weights are read.
    for name, style_name in styles.items():
        if name in modules:
            style(style_name).check(modules[name], name, spec.tp.plain_linear_classes)
    moe_blocks = _sequence_sharded_moe(model, styles, experts) if sequence_parallel else {}
    structure = find_structure(
        model,
        styles,
        stacks=sorted(matching(model, spec.sp.layer_stacks)) if spec.sp.layer_stacks else None,
        within=find_text_model(model),
        regions=expand_regions(model, spec),
        multi_input_blocks=matching(model, spec.tp.multi_input_blocks),
        pointwise_containers=matching(model, spec.sp.pointwise_containers) | moe_blocks.keys(),
        pointwise=frozenset(name for parts in moe_blocks.values() for name in parts),
    )
    if sequence_parallel and not structure.stacks:
        raise UnsupportedError(
            f"model type {spec.model_type!r}: no stack of layers found for sequence parallelism. Set "
            "sequence_parallel=False."
        )
    # Linears with fewer heads than tp ranks: several ranks hold the same shard.
    copies = shared_heads(model, styles, tp_size)
    sizes = local_sizes(model, spec, styles, copies, tp_size)
    sizes = {name: sizes[name] for name in sizes if not _is_inside(name, experts)}
    parameters = [name for name, _ in model.named_parameters()]
    # Parameters that a layer itself adds to its local tokens: their gradient is partial with a sharded sequence.
    of_layers = frozenset(name for name in parameters if generic(name) in spec.cp.layer_parameters)
    shardings = assign_shardings(
        model, styles, structure, copies, sequence_parallel, model.all_tied_weights_keys, of_layers
    )
    state.shardings.update(shardings)
    state.placed[NAME] = TensorPlan(styles, structure, copies, sizes, frozenset(moe_blocks), heads)


def _find_head_blocks(
    model: nn.Module, spec: ModelSpec, styles: Mapping[str, str], tp_size: int
) -> dict[str, HeadBlock]:
    """Returns the blocks to shard by heads: the plan splits none of their weights, and tp_size divides their heads."""
    head_blocks = {}
    for name, module in model.named_modules():
        known = lookup(name, spec.cp.head_sharded_blocks)
        if known is None or not has_counted_heads(module, known) or any(_is_inside(other, [name]) for other in styles):
            continue
        if divides(module, known, tp_size, takes_one_group=True):
            head_blocks[name] = known
    return head_blocks


def _plan_head_blocks(modules: Mapping[str, nn.Module], blocks: Mapping[str, HeadBlock]) -> dict[str, str]:
    """Assigns styles to head-sharded blocks and to the modules with parameters inside them."""
    styles = {}
    for name, heads in blocks.items():
        # A norm of gathered features computes the complete gradient on every rank; all others see local heads only.
        gathered = heads.norms_of_groups if is_one_group(modules[name], heads) else ()
        for inner_name, part in modules[name].named_modules():
            if inner_name and any(parameter is not None for parameter in part._parameters.values()):
                styles[f"{name}.{inner_name}"] = (
                    "replicated" if inner_name in gathered else "replicated_with_grad_allreduce"
                )
        styles |= {f"{name}.{router}": "router_logits" for router in heads.routers}
        styles[name] = "head_sharded"
        styles |= {f"{name}.{inner_name}": of for inner_name, of in plan_head_weights(modules[name], heads).items()}
    return styles


def _sequence_sharded_moe(model: Any, styles: Mapping[str, str], experts: Mapping[str, int]) -> dict[str, list[str]]:
    """Maps the MoE blocks that can run on a sequence shard to their children; empty unless all of them can."""
    moe_blocks = pointwise_moe_blocks(model, experts)
    for name in (child for children in moe_blocks.values() for child in children):
        splits = any(style(of).splits for other, of in styles.items() if f"{other}.".startswith(f"{name}."))
        if splits and name not in experts and uniform_row(name, model.get_submodule(name), styles) is None:
            # The ranks all-reduce partial sums of the same tokens here, so they cannot hold different tokens.
            return {}
    return moe_blocks


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def install(model: Any, state: ParallelState) -> None:
    """Installs the parallel forward of every module of a loaded model."""
    plan: TensorPlan | None = state.placed.get(NAME)
    if plan is None:
        if chunks_loss(state):
            install_unsharded_head(model, state)
        return
    mesh, config = state.mesh, state.config
    # Hooks with ids from here on belong to this library; users' hooks come later.
    first_hook = RemovableHandle.next_id
    engine = state.data_parallel
    assert engine is not None
    check = ParameterCheck(state.shardings, lambda: engine.parameters.marked)
    check.check(model)
    check.install(state.hooks)
    # Shared state for replicated activations, local state for sharded ones.
    rng = TensorParallelRng(mesh.device, mesh.tp_rank)
    # A pipeline may have removed modules since the plan was made.
    structure = plan.structure.restricted_to({name for name, _ in model.named_modules()})
    packs = config.packs_activations(dist.get_backend(mesh.tp_group))
    regions = Regions(
        structure,
        plan.styles,
        mesh.tp_group,
        rng,
        sequence_parallel=config.sequence_parallel,
        packs=packs,
        sequence_dim=state.spec.sp.sequence_dim,
        residual_streams_first=state.spec.sp.residual_streams_first,
    )
    forwards = ActiveForwards()
    forwards.install(model, state.hooks)
    for name, module in list(model.named_modules()):
        _install_style(name, module, model, state, plan, regions, forwards)
    state.placed[REGIONS] = regions
    state.placed[FORWARDS] = forwards
    # Block hooks are installed after the styles' hooks, so that a region wraps everything inside its block.
    spec = state.spec
    arguments = {name: spec.cp.sequence_dims.get(name, SEQUENCE_DIM) for name in spec.sp.per_token_arguments}
    # Called on hidden states at the end of a pipeline stage inside of a stack.
    state.leaving = regions.install(
        model, state.hooks, arguments, spec.sp.per_token_inputs, spec.sp.unshardable_arguments, spec.pp.recorded_layers
    )
    _keep_full_states(model, state, regions)
    state.full_sequence_fns += [(name, stack.on_full_sequence) for name, stack in regions.stacks.items()]
    if plan.sequence_sharded_moe:
        # Router losses need all tokens: [batch * sequence / tp, experts] -> [batch * sequence, experts].
        state.loss.join_tokens = regions.gather_token_outputs
        state.hooks.add("router logits", exit=regions.join_router_logits)
    install_pending_loss(model, state)
    refused = {
        "output_attentions": "each rank has only the attention maps of its heads. Load the model without "
        "megatron_config."
    }
    if config.sequence_parallel:
        refused["output_hidden_states"] = (
            "between layers each rank has only its shard of the sequence. Set sequence_parallel=False."
        )
    OutputChecks(refused).install(state.hooks)
    # A previous forward may have raised inside a layer, with the local RNG state active.
    SyncedRngState(mesh.device, mesh.host_group(AXIS), rng.use_shared_rng).install(state.hooks)
    if state.cut is None:
        RngObserver(rng).install(state.hooks)
    _guard_activations(model, state, plan, structure, regions, forwards, first_hook)


def _keep_full_states(model: Any, state: ParallelState, regions: Regions) -> None:
    """Wraps the function that records hidden states between layers, so that it stores full sequences."""
    if (name := state.spec.sp.hidden_state_recorder) is not None:
        for layers, stack in regions.stacks.items():
            owner = model.get_submodule(layers.rpartition(".")[0])
            state.patches.replace(owner, name, stack.with_gathered_states(getattr(owner, name)))


def _guard_activations(
    model: Any,
    state: ParallelState,
    plan: TensorPlan,
    structure: Structure,
    regions: Regions,
    forwards: ActiveForwards,
    first_hook: int,
) -> None:
    """Installs the checks that pass full activations to user functions or reject the functions."""
    # Placeholders of off-stage modules have no parameters.
    layers = [layer for stack in structure.stacks for layer in model.get_submodule(stack).children()]
    local_modules = {module for layer in layers if computes_here(layer) for module in layer.modules()}
    modules = {name: module for name, module in model.named_modules() if name in plan.styles or module in local_modules}
    kinds = {name: type(modules[name]) for name in structure.uniform if name in modules}
    activations = Activations(structure, plan.styles, dict(state.shardings), regions, kinds)
    replicated_names = {name for name, module in modules.items() if activations.of(name, module).is_replicated}
    for name in modules.keys() - replicated_names:
        if isinstance(modules[name], LocalParameters | ParallelLinear):
            modules[name].shard_name = name
    # Calls of these modules count as forwards: the sharded modules inside are called with the shards they expect.
    for name in replicated_names | _around((*structure.stacks, *names_in_encoder(model))):
        if next(model.get_submodule(name).children(), None) is not None:
            forwards.track(model.get_submodule(name))
    for layer in filter(computes_here, layers):
        compile_locally(layer)
    # The base model may be called directly; it holds no reference to the model around it.
    models = (model,) if model.base_model is model else (model, model.base_model)
    # Records the modules' classes, so it follows the last change of a class.
    exchanged = ExchangedFunctions({n: module for n, module in modules.items() if activations.see_parts(n)})
    exchanged.install(state.hooks, *models)
    calls = CallsInHooks(activations, {id(module): name for name, module in modules.items()}, forwards)
    hooks = UserHooks(activations, regions.rng, calls, modules, first_hook)
    hooks.install(state.hooks, *models)
    state.placed.setdefault(GUARDS, []).extend([exchanged, hooks])


def _around(stacks: Iterable[str]) -> set[str]:
    """Returns the names of the modules that contain the stacks, at any depth."""
    paths = [stack.split(".") for stack in stacks]
    return {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}


def _install_style(
    name: str,
    module: Any,
    model: Any,
    state: ParallelState,
    plan: TensorPlan,
    regions: Regions,
    forwards: ActiveForwards,
) -> None:
    """Installs the parallel forward of one module, according to its style and its parameters' shardings."""
    mesh, text = state.mesh, model.config.get_text_config()
    # Modules without a style have replicated parameters and an unchanged forward.
    rules = style(plan.styles.get(name, "replicated"))
    shardings = {
        parameter: state.shardings[f"{name}.{parameter}" if name else parameter]
        for parameter, value in module._parameters.items()
        if value is not None
    }
    context = ModuleContext(
        name=name,
        mesh=mesh,
        gradient={parameter: sharding.gradient for parameter, sharding in shardings.items()},
        region=regions.of_linear.get(name),
        rng=regions.rng,
        forwards=forwards,
        copies=plan.head_copies.get(name, 1),
        rotary_dim=getattr(text, "qk_rope_head_dim", None),
        heads=plan.heads.get(name),
        loss_chunk_size=state.config.loss_chunk_size,
        hooks=state.hooks,
    )
    rules.install(module, context)
    # Parameters that the style does not convert itself become local tensors on attribute access.
    if names := tuple(parameter for parameter in shardings if not rules.reads(parameter)):
        summed, addends = _names(shardings, summed=True), _names(shardings, addends=True)
        read_locally(module, mesh, forwards, summed, addends, names, shards_weights=state.shards_weights)
    if widths := split_widths(shardings.values(), state.axes):
        GroupedWidths(widths, mesh.tp_size).install(module, state.hooks)
    give_sizes(module, plan.local_sizes.get(name, {}))
    if (arguments := lookup(name, state.spec.tp.local_arguments)) is not None:
        LocalArguments(arguments, text.num_attention_heads, mesh).install(module, state.hooks)


def _names(
    shardings: Mapping[str, ParameterSharding], *, summed: bool = False, addends: bool = False
) -> frozenset[str]:
    """Returns the parameters whose gradient is summed over tp, or those added by every rank in shares."""
    return frozenset(
        name
        for name, sharding in shardings.items()
        if (summed and sharding.gradient.sum == AXIS and sharding.gradient.copies is None)
        or (addends and style(sharding.style).shares_sum)
    )
