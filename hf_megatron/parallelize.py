"""The one entry: a stock model on the meta device in, the same model laid out over the mesh out.

    place    validate -> resolve the spec -> claim every parameter -> DTensor placeholders (before weights are read)
    install  local attributes -> modules compute with local parameters -> regions and loss -> data parallelism (after)

Between the two, transformers' own loader, or `checkpoint.initialize`, fills each rank's shards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .communication.random import ReplicatedState
from .config import MegatronConfig
from .data_parallel.engine import DataParallel
from .data_parallel.fully_sharded import shard_weights
from .data_parallel.loss import mean_over_ranks
from .errors import ConfigError, UnsupportedError
from .mesh import ParallelMesh
from .pipeline_parallel.cut import Cut, cut
from .pipeline_parallel.engine import Pipeline
from .registry import own_spec, spec_for
from .registry.claims import (
    check_conversions,
    claim_all,
    expand_plan,
    expand_regions,
    local_sizes,
    matching,
    shared_heads,
)
from .registry.patterns import lookup
from .spec import Claim, GradientRule, ModelSpec, Placement
from .tensor_parallel.forward import ClaimCheck, RefusedOutputs, SynchronisedDropout
from .tensor_parallel.heads import LocalArguments
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
from .upstream import loss_functions, renamed_by_loader


@dataclass
class ParallelState:
    """What hf_megatron knows of one model; kept on it as `_hf_megatron`.

    Attributes:
        claims: of every parameter of the whole model, those of other pipeline stages included.
        cut, pipeline (*optional*): how the layers were cut into stages, and what runs them.
        names: in the whole model's state dict, in its order; empty where no other stage holds any.
        elsewhere: those of them that other stages hold, under the names of files too.
    """

    config: MegatronConfig
    mesh: ParallelMesh
    spec: ModelSpec
    styles: Mapping[str, str]
    claims: Mapping[str, Claim]
    structure: Structure
    head_copies: Mapping[str, int]
    local_sizes: Mapping[str, Mapping[str, int]]
    cut: Cut | None = None
    names: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    pipeline: Pipeline | None = None
    data_parallel: DataParallel | None = None

    @property
    def shards_weights(self) -> bool:
        """Whether the dp ranks split the weights themselves (stage 3)."""
        return self.config.zero_stage == 3 and self.mesh.dp_size > 1

    def __deepcopy__(self, memo: dict) -> "ParallelState":
        return self


class ParallelPlan(list[Claim]):
    """The claims of a model, one row per parameter; prints as a table.

    Attributes:
        cut (`Cut`, *optional*): the pipeline stages, where there are several.
    """

    def __init__(self, claims: Iterable[Claim] = (), cut: Cut | None = None):
        super().__init__(claims)
        self.cut = cut

    def __str__(self) -> str:
        rows = [["parameter", "global shape", "style", "placement", "gradient"]]
        rows += [[c.name, str(list(c.shape)), c.style, str(c.placement), c.gradient.value] for c in self]
        if self.cut is not None:
            stages = [self.cut.stages_of(claim.name) for claim in self]
            for row, cell in zip(rows, ["stage", *stages], strict=True):
                row.append(cell)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def parallel_state(model: Any) -> ParallelState | None:
    """The parallel state of a model, or `None` for a model this library did not lay out."""
    return vars(model).get("_hf_megatron")


def place(model: Any, config: MegatronConfig, mesh: ParallelMesh) -> ParallelState:
    """Replaces every parameter of a meta model by a DTensor placeholder of the same name and global shape.

    Raises:
        PlanError: a rule matches nothing, a style does not fit its module, or tied parameters are claimed differently.
        ConfigError: heads that cannot be split over tp_size.
        UnsupportedError: sequence parallelism for a type that has none.
    """
    if mesh.tp_size == 1:
        return _place_whole(model, config, mesh)
    spec = spec_for(model)
    if config.sequence_parallel and spec.no_sequence_parallel is not None:
        raise UnsupportedError(
            f"model type {spec.model_type!r} has no sequence parallelism: {spec.no_sequence_parallel} Set "
            "sequence_parallel=False."
        )
    styles = expand_plan(model, spec)
    modules = dict(model.named_modules())
    for name, style_name in styles.items():
        if name in modules:
            style(style_name).check(modules[name], name, spec.plain_linear_classes)
    structure = find_structure(
        model,
        styles,
        stacks=sorted(matching(model, spec.stacks)) if spec.stacks else None,
        regions=expand_regions(model, spec),
        several_inputs=matching(model, spec.several_inputs),
        transparent=matching(model, spec.transparent),
    )
    if config.sequence_parallel and not structure.stacks:
        raise UnsupportedError(f"model type {spec.model_type!r}: no stack of layers found to split the sequence of.")
    copies = shared_heads(model, styles, mesh.tp_size)
    sizes = local_sizes(model, spec, styles, copies, mesh.tp_size)
    claims = claim_all(model, styles, structure, copies, config.sequence_parallel)
    check_conversions(model, claims)

    pieces, names, elsewhere = _cut(model, spec, config, mesh)
    present = {name for name, _ in model.named_modules()}
    structure = structure.restricted_to(present)

    placeholders: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placeholders:
                claim = claims[f"{module_name}.{parameter_name}" if module_name else parameter_name]
                placeholders[id(parameter)] = _placeholder(parameter, claim.placement, mesh)
            module._parameters[parameter_name] = placeholders[id(parameter)]
    state = ParallelState(config, mesh, spec, styles, claims, structure, copies, sizes, pieces, names, elsewhere)
    model._hf_megatron = state
    return state


def _place_whole(model: Any, config: MegatronConfig, mesh: ParallelMesh) -> ParallelState:
    """Parameters stay whole, as the plain tensors they are: no plan is asked, any architecture will do."""
    claims = {
        name: Claim(name, tuple(parameter.shape), "replicated", Placement(), GradientRule.COMPLETE)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    spec = own_spec(model) or ModelSpec(model.config.model_type)
    cuts = _cut(model, spec, config, mesh)
    model._hf_megatron = ParallelState(config, mesh, spec, {}, claims, Structure(), {}, {}, *cuts)
    return model._hf_megatron


def _cut(
    model: Any, spec: ModelSpec, config: MegatronConfig, mesh: ParallelMesh
) -> tuple[Cut | None, tuple[str, ...], frozenset[str]]:
    """Leaves of the model what this rank's stages own; returns also the names of all weights and of those that went."""
    if mesh.pp_size == 1:
        return None, (), frozenset()
    names = tuple(model.state_dict())
    pieces = cut(model, spec, config, mesh)
    gone = set(names) - model.state_dict().keys()
    return pieces, names, frozenset(gone | renamed_by_loader(model, gone))


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
    if state.shards_weights:
        # First, so that FSDP2's hooks lie inside those that move activations between ranks.
        ends = [] if state.cut is None else state.cut.ends(model)
        shard_weights(model, state.config, state.mesh, ends)
    if state.mesh.tp_size > 1:
        _install_tensor_parallel(model, state)
    shifting = loss_functions()
    original = getattr(model.loss_function, "__wrapped__", model.loss_function)
    if state.mesh.dp_size > 1 and state.cut is None and original in shifting:
        model.loss_function = mean_over_ranks(model.loss_function, shift=shifting[original], mesh=state.mesh)
    state.data_parallel = DataParallel(model, state.config, state.mesh)
    if state.cut is not None:
        state.pipeline = Pipeline(model, state.config, state.mesh, state.cut, state.data_parallel)


def _install_tensor_parallel(model: Any, state: ParallelState) -> None:
    mesh, config, structure = state.mesh, state.config, state.structure
    check = ClaimCheck(frozenset(state.claims))
    check.check(model)
    check.install(model)
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
            copies=state.head_copies.get(name, 1),
            rotary_dim=rotary_dim,
            loss_chunk_size=config.loss_chunk_size,
        )
        rules.install(module, context)
        if rules.reads_locally and gradient:
            summed = frozenset(p for p, rule in gradient.items() if rule is GradientRule.SUM_TP)
            claimed = {p: style(state.claims[f"{name}.{p}" if name else p].style) for p in gradient}
            read_locally(module, mesh, summed, frozenset(p for p, rule in claimed.items() if rule.shares_sum))
        for attribute, size in state.local_sizes.get(name, {}).items():
            setattr(module, attribute, size)
        if (arguments := lookup(name, state.spec.local_arguments)) is not None:
            heads = model.config.get_text_config().num_attention_heads
            LocalArguments(arguments, heads, mesh.tp_size, mesh.tp_rank).install(module)

    # A block's hooks are installed after the styles', so that its region wraps what happens inside.
    for block, region in uniform.items():
        region.install(model.get_submodule(block))
    for block, stack in structure.whole.items():
        if config.sequence_parallel:
            WholeSequenceRegion(stacks[stack]).install(model.get_submodule(block))
    for name, stack_state in stacks.items():
        layers: Any = model.get_submodule(name)
        stack_state.install(layers)
        owned = [layer for layer in layers if next(layer.parameters(), None) is not None]
        if state.spec.sequence_arguments:
            SequenceArguments(state.spec.sequence_arguments, mesh.tp_group).install(owned)
        if state.cut is not None:
            state.cut.boundary.leaving = stack_state.leave_split
    _install_loss(model)
    RefusedOutputs(config.sequence_parallel).install(model)
    if has_dropout(model):
        SynchronisedDropout(dropout.state, mesh).install(model)


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
        raise ConfigError(
            "The model was loaded without megatron_config (or with all sizes 1): it has no parallel plan."
        )
    return ParallelPlan(state.claims.values(), state.cut)


def local_numel(model: nn.Module) -> int:
    """Parameter entries this rank holds."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


__all__ = ["ParallelPlan", "ParallelState", "install", "local_numel", "parallel_plan", "parallel_state", "place"]
