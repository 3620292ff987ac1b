"""Expert parallelism: placement of experts on ranks, and installation of token dispatch on a model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.placement import GradientRule, Placement, Split
from ..data_parallel.fsdp import outermost_layers
from ..errors import ConfigError, UnsupportedError
from ..models.experts import find_experts, find_identity_experts, names_inside
from ..models.spec import lookup
from ..parallel_state import ParallelState
from ..tensor_parallel.axis import GUARDS
from ..tensor_parallel.local_parameters import ActiveForwards, read_locally, swap_class
from ..tensor_parallel.user_hooks.replaced_functions import ExchangedFunctions
from .expert_load import NAME as LOAD
from .expert_load import ExpertCounts
from .experts import ExpertRanks, ParallelExperts
from .padding import RouterPadding
from .router_bias import install_router_biases, require_router_bias
from .routing_cache import install_tapes
from .shared_experts import find_shared_experts
from .token_dispatcher import AllToAll, ExpertBlocks

NAME = "ep"
_REPEATED = "edp"
_BIASES = "router biases"


@dataclass(frozen=True)
class ExpertPlan:
    """Modules that hold experts, with their global number of experts and of equal blocks.

    Attributes:
        experts: module -> number of experts on all ranks.
        blocks: module -> number of equal blocks that are split over the ranks.
        identity: modules in which choices after the last expert return tokens unchanged.
    """

    experts: Mapping[str, int]
    blocks: Mapping[str, int]
    identity: frozenset[str]

    def held(self, name: str, ranks: int) -> ExpertBlocks:
        """Returns the experts of a module that each rank holds."""
        return ExpertBlocks(self.experts[name], ranks, self.blocks[name])


def place(model: Any, state: ParallelState) -> None:
    """Splits experts over ep; tensor parallelism may have split their widths already.

    Raises `ConfigError` for a model without experts or with numbers of experts that ep_size does not divide, and
    `UnsupportedError` for a model whose experts are not called in a way that allows dispatch.
    """
    ranks, spec = state.axes.size(NAME), state.spec
    if state.config.router_bias_update_rate:
        require_router_bias(model, state)
        # A pipeline may remove layers later.
        state.placed[_BIASES] = find_experts(model, spec)
    if ranks == 1:
        return
    setting = f"MegatronConfig.ep_size = {ranks}"
    experts = find_experts(model, spec)
    if not experts:
        if (unknown := _unknown_experts(model)) is not None:
            raise UnsupportedError(
                f"{setting}: {unknown} of {type(model).__name__} is not called like transformers' experts, with hidden "
                "states, expert indices and weights. Set ep_size=1."
            )
        raise ConfigError(f"{setting}: {type(model).__name__} has no MoE layers. Set ep_size=1.")
    identity = find_identity_experts(model, spec, experts)
    # A weight may have entries for identity experts after the real ones: this block size divides both.
    block = {name: math.gcd(count, identity.get(name, 0)) for name, count in experts.items()}
    for name, size in block.items():
        if size % ranks:
            count, more = experts[name], identity.get(name, 0)
            valid = [number for number in range(1, size + 1) if size % number == 0]
            suffix, divide = (f" and {more} identity experts", "both") if more else ("", "them")
            raise ConfigError(f"{setting}: {name} has {count} experts{suffix}; valid sizes divide {divide}: {valid}.")
    for name, module in names_inside(model, experts).items():
        sharding, count = state.shardings[name], experts[module]
        has_more = module in identity and sharding.shape[0] == count + identity[module]
        # A norm inside the experts has one entry per feature, not per expert.
        is_of_features = len(sharding.shape) == 1 and sharding.shape[0] != count
        if (sharding.shape[0] % count and not has_more) or is_of_features:
            raise UnsupportedError(
                f"{setting}: {name} {list(sharding.shape)} does not hold {count} experts along dim 0. Set ep_size=1."
            )
        if any(split.dim == 0 for split in sharding.placement.splits):
            raise UnsupportedError(
                f"{setting}: {name} is already sharded along dim 0 ({sharding.placement}). Set ep_size=1."
            )
        groups = sharding.shape[0] // block[module] if module in identity else 1
        state.shardings[name] = replace(
            sharding,
            style="expert_parallel" if sharding.style == "replicated" else sharding.style,
            placement=Placement((Split(NAME, 0, groups), *sharding.placement.splits)),
            # An unsharded expert sees all of its tokens, so its gradient is complete. With etp, the gradient rule of
            # the parameter's tp style applies.
            gradient=replace(sharding.gradient if state.axes.size("etp") > 1 else GradientRule(), average=_REPEATED),
        )
    blocks = {name: count // block[name] for name, count in experts.items()}
    state.placed[NAME] = ExpertPlan(experts, blocks, frozenset(identity))
    state.shared_apart = tuple(experts)


def _unknown_experts(model: Any) -> str | None:
    """Returns the name and class of a module that holds experts with an unknown call, or `None`."""
    named = ((name, type(module).__name__) for name, module in model.named_modules())
    return next((f"{name} ({kind})" for name, kind in named if "expert" in f"{name}.{kind}".lower()), None)


def install(model: Any, state: ParallelState) -> None:
    """Installs token dispatch on the experts of this rank's layers."""
    tensor_plan = state.placed.get("tp")
    sequence_sharded_moe = frozenset() if tensor_plan is None else tensor_plan.sequence_sharded_moe
    present = {name for name, _ in model.named_modules()}
    padding = RouterPadding(state, sequence_sharded_moe)
    if state.placed.get(_BIASES) is not None or state.placed.get(NAME) is not None:
        padding.install(model, state.hooks)
    if (counted := state.placed.get(_BIASES)) is not None:
        local_counts = {name: count for name, count in counted.items() if name in present}
        install_router_biases(model, state, local_counts, padding, pieces=bool(sequence_sharded_moe))
    plan: ExpertPlan | None = state.placed.get(NAME)
    if plan is None:
        return
    mesh = state.mesh
    group, ranks = mesh.group(NAME), state.axes.size(NAME)
    reads_locally = state.axes.size("tp") == 1
    forwards = ActiveForwards()
    if reads_locally:
        forwards.install(model, state.hooks)
    # tp ranks hold the same tokens: each dispatches its share of them, unless it has a shard of every expert's width.
    shared = mesh.tp_group if state.axes.size("tp") > state.axes.size("etp") else None
    modules = dict(model.named_modules())
    inside: dict[str, Any] = {}
    present_experts = [name for name in plan.experts if name in modules]
    most = max(plan.experts, key=lambda name: plan.experts[name])
    counts = state.placed[LOAD] = ExpertCounts(present_experts, plan.held(most, ranks), state, padding)
    layer_by_module_id = {id(part): layer for layer in outermost_layers(model) for part in layer.modules()}
    for name, count in plan.experts.items():
        if name not in modules:
            # The module is on another pipeline stage.
            continue
        experts: Any = modules[name]
        for part in experts.modules():
            if part._parameters and reads_locally:
                read_locally(part, mesh, forwards, frozenset())
            if part._parameters:
                # Experts see the tokens of all ranks of the batch, but their gradient is averaged only over the few
                # ranks with the same experts.
                part.gradient_factor = state.axes.size(_REPEATED) / state.axes.size("dp_cp")  # type: ignore[assignment]
        if not experts._parameters:
            # The parameters belong to a child module, as in DBRX.
            experts.forwards = next(part.forwards for part in experts.modules() if part._parameters)
            experts.shard_name = None
        counter = lookup(name, state.spec.moe.experts) or "num_experts"
        swap_class(experts, ParallelExperts)  # type: ignore[arg-type]
        are_split = name.rpartition(".")[0] in sequence_sharded_moe
        moe_block: Any = modules[name.rpartition(".")[0]]
        early = find_shared_experts(moe_block)
        tapes = install_tapes(layer_by_module_id.get(id(experts), moe_block), moe_block, early)
        experts.ranks = ExpertRanks(
            AllToAll(count // ranks, group),
            plan.held(name, ranks),
            # Ranks with a shard of every expert sum their outputs, so each adds its share.
            1 / state.axes.size("etp") if name in plan.identity else None,
            None if are_split else shared,
            tapes,
            counts,
            name,
            counter,
            {part: _shapes(state, f"{name}.{part}") for part, _ in experts.named_parameters()},
            early,
        )
        inside |= {f"{name}.{part}".rstrip("."): module for part, module in experts.named_modules()}
    exchanged = ExchangedFunctions(inside, "ep_size")
    exchanged.install(state.hooks, model)
    state.placed.setdefault(GUARDS, []).append(exchanged)


def _shapes(state: ParallelState, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sharding = state.shardings[name]
    return tuple(sharding.shape), sharding.placement.local_shape(sharding.shape, state.axes)
