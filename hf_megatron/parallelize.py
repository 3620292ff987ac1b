"""The one entry: a stock model on the meta device in, the same model laid out over the mesh out.

    place    validate -> resolve the spec -> claim every parameter -> DTensor placeholders (before weights are read)
    install  local attributes -> modules compute with local parameters -> regions and loss (after they are read)

Between the two, transformers' own loader, or `checkpoint.initialize`, fills each rank's shards.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .communication.random import ReplicatedState
from .config import MegatronConfig
from .errors import ConfigError, PlanError, UnsupportedError
from .mesh import ParallelMesh
from .registry import spec_for
from .registry.patterns import generic, lookup
from .spec import Claim, GradientRule, ModelSpec, Placement
from .tensor_parallel.heads import LocalArguments
from .tensor_parallel.forward import RefusedOutputs, SynchronisedDropout
from .tensor_parallel.local import dtensor_placements, read_locally
from .tensor_parallel.logits import PendingLoss, VocabParallelHead, sharded_loss
from .tensor_parallel.region import (
    DropoutStreams,
    SequenceArguments,
    SequenceStack,
    UniformRegion,
    WholeSequenceRegion,
    has_dropout,
)
from .tensor_parallel.structure import Structure, find_structure
from .tensor_parallel.styles import ModuleContext, style
from .upstream import loss_functions, rearranging_conversions


@dataclass
class ParallelState:
    """What hf_megatron knows of one model; kept on it as `_hf_megatron`."""

    config: MegatronConfig
    mesh: ParallelMesh
    spec: ModelSpec
    styles: Mapping[str, str]
    claims: Mapping[str, Claim]
    structure: Structure
    head_groups: Mapping[str, int]

    def __deepcopy__(self, memo: dict) -> "ParallelState":
        return self


class ParallelPlan(list[Claim]):
    """The claims of a model, one row per parameter; prints as a table."""

    def __str__(self) -> str:
        rows = [("parameter", "global shape", "style", "placement", "gradient")]
        rows += [(c.name, str(list(c.shape)), c.style, str(c.placement), c.gradient.value) for c in self]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def parallel_state(model: Any) -> ParallelState | None:
    """The parallel state of a model, or `None` for a model this library did not lay out."""
    return vars(model).get("_hf_megatron")


def _expand(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Concrete module and parameter names -> style names; a rule that matches nothing raises."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    styles = {name: found for name in names if (found := lookup(name, spec.plan)) is not None}
    unmatched = spec.plan.keys() - {name for name in styles} - {generic(name) for name in styles}
    if unmatched:
        raise PlanError(f"model type {spec.model_type!r}: rules {sorted(unmatched)} match nothing in {type(model).__name__}.")
    for name in styles.values():
        style(name)
    modules = {name for name, _ in model.named_modules()} | {generic(name) for name, _ in model.named_modules()}
    for patterns in (spec.local_attributes, spec.local_arguments, spec.several_inputs, spec.transparent, spec.stacks):
        if not modules.issuperset(patterns):
            missing = sorted(set(patterns) - modules)
            raise PlanError(f"model type {spec.model_type!r}: patterns {missing} match nothing in {type(model).__name__}.")
    return styles


def _check_conversions(model: nn.Module, claims: Mapping[str, Claim]) -> None:
    """Raises for split parameters whose checkpoint holds them in another arrangement than memory does."""
    split = [name for name, claim in claims.items() if claim.placement.dim is not None]
    for patterns, operations in rearranging_conversions(model):
        for name in split:
            if any(re.search(pattern, name) for pattern in patterns):
                raise UnsupportedError(
                    f"{name}: checkpoints of {type(model).__name__} hold it rearranged ({operations}), so that a rank "
                    "cannot read its part alone. Load this model without tp_size."
                )


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_modules() if name in patterns or generic(name) in patterns)


def _regions(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    pairs = {}
    for block_pattern, row_pattern in spec.regions.items():
        blocks = sorted(_matching(model, (block_pattern,)))
        rows = sorted(_matching(model, (row_pattern,)))
        if not blocks or len(blocks) != len(rows):
            raise PlanError(f"model type {spec.model_type!r}: region {block_pattern} -> {row_pattern} does not pair up.")
        pairs.update(zip(blocks, rows, strict=True))
    return pairs


def _copies(model: nn.Module, styles: Mapping[str, str], tp_size: int) -> dict[str, int]:
    """How many neighbouring ranks share a shard of each linear that makes heads; heads that do not split raise."""
    copies = {}
    for name, module in model.named_modules():
        parent_name, _, leaf = name.rpartition(".")
        if styles.get(name) != "column" or leaf not in ("q_proj", "k_proj", "v_proj"):
            continue
        parent = model.get_submodule(parent_name)
        head_dim = vars(parent).get("head_dim")
        key = parent._modules.get("k_proj") if leaf == "v_proj" else module
        if not isinstance(head_dim, int) or not isinstance(key, nn.Linear) or key.out_features % head_dim:
            continue
        heads = key.out_features // head_dim
        if heads % tp_size == 0:
            continue
        kind = "attention" if leaf == "q_proj" else "key/value"
        if leaf == "q_proj" or tp_size % heads:
            valid = [size for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"MegatronConfig.tp_size = {tp_size}: {name} has {heads} {kind} heads, which cannot be split; valid "
                f"tp sizes divide them{'' if leaf == 'q_proj' else ' or are a multiple of them'}: {valid}."
            )
        copies[name] = tp_size // heads
    return copies


def _claim_all(
    model: nn.Module,
    styles: Mapping[str, str],
    structure: Structure,
    copies: Mapping[str, int],
    sequence_parallel: bool,
) -> dict[str, Claim]:
    claims: dict[str, Claim] = {}
    of_tensor: dict[int, Claim] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            style_name = styles.get(name) or styles.get(module_name) or "replicated"
            rules = style(style_name)
            placement = rules.placement(parameter_name, parameter, module)
            if module_name in copies:
                placement = Placement(placement.dim, placement.groups, copies[module_name])
            if placement.dim is not None and parameter.shape[placement.dim] % placement.groups:
                raise PlanError(f"{name}: dim {placement.dim} of {tuple(parameter.shape)} is not {placement.groups} equal blocks.")
            gradient = rules.gradient(placement)
            if sequence_parallel and placement.dim is None and structure.is_pointwise_parameter(name):
                gradient = GradientRule.SUM_TP
            claim = Claim(name, tuple(parameter.shape), style_name, placement, gradient)
            tied = of_tensor.setdefault(id(parameter), claim)
            if (tied.placement, tied.gradient) != (claim.placement, claim.gradient):
                raise PlanError(f"{name} is tied to {tied.name} but claimed as {placement}, the other as {tied.placement}.")
            claims[name] = claim
    return claims


def place(model: Any, config: MegatronConfig, mesh: ParallelMesh) -> ParallelState:
    """Replaces every parameter of a meta model by a DTensor placeholder of the same name and global shape.

    Raises:
        PlanError: a rule matches nothing, a style does not fit its module, or tied parameters are claimed differently.
        ConfigError: heads that cannot be split over tp_size.
        UnsupportedError: sequence parallelism for a type that has none.
    """
    spec = spec_for(model)
    if config.sequence_parallel and spec.no_sequence_parallel is not None:
        raise UnsupportedError(
            f"model type {spec.model_type!r} has no sequence parallelism: {spec.no_sequence_parallel} Set "
            "sequence_parallel=False."
        )
    styles = _expand(model, spec)
    modules = dict(model.named_modules())
    for name, style_name in styles.items():
        if name in modules:
            style(style_name).check(modules[name], name, spec.plain_linear_classes)
    structure = find_structure(
        model,
        styles,
        stacks=sorted(_matching(model, spec.stacks)) if spec.stacks else None,
        regions=_regions(model, spec),
        several_inputs=_matching(model, spec.several_inputs),
        transparent=_matching(model, spec.transparent),
    )
    if config.sequence_parallel and not structure.stacks:
        raise UnsupportedError(f"model type {spec.model_type!r}: no stack of layers found to split the sequence of.")
    copies = _copies(model, styles, mesh.tp_size)
    claims = _claim_all(model, styles, structure, copies, config.sequence_parallel)
    _check_conversions(model, claims)

    placeholders: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placeholders:
                claim = claims[f"{module_name}.{parameter_name}" if module_name else parameter_name]
                placeholders[id(parameter)] = _placeholder(parameter, claim.placement, mesh)
            module._parameters[parameter_name] = placeholders[id(parameter)]
    state = ParallelState(config, mesh, spec, styles, claims, structure, copies)
    model._hf_megatron = state
    return state


def _placeholder(parameter: Tensor, placement: Placement, mesh: ParallelMesh) -> nn.Parameter:
    axes = mesh.tp if placement.copies == 1 else mesh.tp_with_copies(placement.copies)
    dtensor = distribute_tensor(parameter.detach(), axes, dtensor_placements(placement), src_data_rank=None)
    result = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(result, name, value)
    return result


def install(model: Any) -> None:
    """Makes a placed and filled model compute in parallel: each module with its local parameters."""
    state = parallel_state(model)
    assert state is not None
    mesh, config, structure = state.mesh, state.config, state.structure
    _assert_claimed(model, state)
    dropout = DropoutStreams(mesh.tp_rank, ReplicatedState(mesh.device))

    stacks = {}
    if config.sequence_parallel:
        stacks = {name: SequenceStack(mesh.tp_group, dropout) for name in structure.stacks}
    uniform = {
        block: UniformRegion(mesh.tp_group, dropout, stacks.get(structure.stack_of.get(block, "")))
        for block in structure.uniform
    }
    region_of_linear = {row: uniform[block] for block, row in structure.uniform.items()}
    for block in structure.uniform:
        for name, style_name in state.styles.items():
            if f"{name}.".startswith(f"{block}.") and style(style_name).is_column:
                region_of_linear[name] = uniform[block]

    rotary_dim = getattr(model.config.get_text_config(), "qk_rope_head_dim", None)
    for name, module in list(model.named_modules()):
        rules = style(state.styles.get(name, "replicated"))
        gradient = {
            parameter: state.claims[f"{name}.{parameter}" if name else parameter].gradient
            for parameter, value in module._parameters.items()
            if value is not None
        }
        context = ModuleContext(
            name=name,
            mesh=mesh,
            gradient=gradient,
            region=region_of_linear.get(name),
            copies=state.head_groups.get(name, 1),
            rotary_dim=rotary_dim,
            loss_chunk_size=config.loss_chunk_size,
        )
        rules.install(module, context)
        if rules.reads_locally and gradient:
            summed = frozenset(p for p, rule in gradient.items() if rule is GradientRule.SUM_TP)
            claimed = {p: style(state.claims[f"{name}.{p}" if name else p].style) for p in gradient}
            read_locally(module, mesh, summed, frozenset(p for p, rule in claimed.items() if rule.shares_sum))
        for attribute in lookup(name, state.spec.local_attributes) or ():
            copies = state.head_groups.get(f"{name}.k_proj", 1) if "key_value" in attribute else 1
            _localise(module, name, attribute, mesh.tp_size // copies)
        if (arguments := lookup(name, state.spec.local_arguments)) is not None:
            heads = model.config.get_text_config().num_attention_heads
            LocalArguments(arguments, heads, mesh.tp_size, mesh.tp_rank).install(module)
    _localise_key_value_groups(model, state)

    # A block's hooks are installed after the styles', so that its region wraps what happens inside.
    for block, region in uniform.items():
        region.install(model.get_submodule(block))
    for block, stack in structure.whole.items():
        if config.sequence_parallel:
            WholeSequenceRegion(stacks[stack]).install(model.get_submodule(block))
    for name, stack_state in stacks.items():
        stack_state.install(model.get_submodule(name))
        if state.spec.sequence_arguments:
            SequenceArguments(state.spec.sequence_arguments, mesh.tp_group).install(model.get_submodule(name))
    _install_loss(model)
    RefusedOutputs(config.sequence_parallel).install(model)
    if has_dropout(model):
        SynchronisedDropout(dropout.state, mesh).install(model)


def _assert_claimed(model: nn.Module, state: ParallelState) -> None:
    for name, parameter in model.named_parameters():
        if name not in state.claims:
            raise PlanError(f"{name} appeared after the plan was made; nobody claims it. Add modules before loading.")
        if not isinstance(parameter, DTensor) or parameter.device.type == "meta":
            raise PlanError(f"{name} was not loaded as planned: {type(parameter).__name__} on {parameter.device}.")


def _localise(module: nn.Module, name: str, attribute: str, tp_size: int) -> None:
    value = getattr(module, attribute)
    if isinstance(value, Tensor):
        rank_slice = value.chunk(tp_size)
        if value.shape[0] % tp_size:
            raise ConfigError(f"MegatronConfig.tp_size = {tp_size}: {name}.{attribute} has {value.shape[0]} entries.")
        raise PlanError(f"{name}.{attribute} is a tensor of {len(rank_slice)} pieces; a family hook has to localise it.")
    if value % tp_size:
        raise ConfigError(f"MegatronConfig.tp_size = {tp_size} does not divide {name}.{attribute} = {value}.")
    setattr(module, attribute, value // tp_size)


def _localise_key_value_groups(model: nn.Module, state: ParallelState) -> None:
    """With fewer key/value heads than ranks a head is shared by a part of the query heads that shared it before."""
    for name, attention in model.named_modules():
        groups = vars(attention).get("num_key_value_groups")
        if groups is None or state.styles.get(f"{name}.q_proj") != "column":
            continue
        copies = state.head_groups.get(f"{name}.k_proj", 1)
        if "k_proj" not in attention._modules:
            # Reads the keys and values of an earlier layer.
            heads = attention.get_submodule("q_proj").out_features // attention.head_dim  # type: ignore[operator]
            copies = max(1, state.mesh.tp_size * groups // heads)
        attention.num_key_value_groups = groups // copies


def _install_loss(model: Any) -> None:
    heads = [module for module in model.modules() if isinstance(module, VocabParallelHead)]
    for head in heads:
        PendingLoss(head, model).install(model)
    shifting = loss_functions()
    if heads and model.loss_function in shifting:
        model.loss_function = sharded_loss(model.loss_function, shift=shifting[model.loss_function])


def parallel_plan(model: Any) -> ParallelPlan:
    """The claims of a model in the order of its parameters; `print` shows them as a table."""
    state = parallel_state(model)
    if state is None:
        raise ConfigError("The model was loaded without megatron_config (or with all sizes 1): it has no parallel plan.")
    return ParallelPlan(state.claims.values())


def local_numel(model: nn.Module) -> int:
    """Parameter entries this rank holds."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


__all__ = ["ParallelPlan", "ParallelState", "install", "local_numel", "parallel_plan", "parallel_state", "place", "torch"]
