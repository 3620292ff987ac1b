"""Sharding of PEFT adapters over the ranks of their model.

PEFT creates every adapter in full on every rank, from one random state; afterwards each rank keeps its shard. Adapters
of other pipeline stages are initialized too, so that random numbers match the single-process run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...core.forward_hooks import ForwardHooks
from ...core.off_stage import is_off_stage
from ...core.placement import ADAPTER, GradientRule, Placement, count_shared_copies
from ...errors import UnsupportedError
from ...parallel_state import ParallelState, WeightNames
from ...pipeline_parallel.off_stage_module import Placeholder
from ...tensor_parallel.axis import GUARDS, NAME
from ...tensor_parallel.experts import LatentWithRotary
from ...tensor_parallel.local_parameters import LocalParameters
from ...tensor_parallel.region import FullSequenceRegion, UniformRegion
from .experts import shard_parameter
from .lora import LocalDict, shard_lora
from .site import Site, linear_factors
from .tokens import has_own_tokens, shard_tokens, tokens_layer


def shard_copies(copies: nn.ModuleDict, within: str, site: Site) -> None:
    """Registers the shardings of copies, by adapter, as for the copied module."""
    for adapter, copy in copies.items():
        for param_name, _ in copy.named_parameters():
            inner = f"{within}.{adapter}.{param_name}"
            if not site.has_sharding(inner):
                site.add_copy(inner, site.state.shardings[f"{site.base_name}.{param_name}"])


def shard_norms(tuner: Any, site: Site) -> None:
    """Shards the adapters of an LN-tuning layer."""
    shard_copies(tuner.ln_tuning_layers, "ln_tuning_layers", site)


def shard_saved(wrapper: Any, site: Site) -> None:
    """Shards the copies of a module in `modules_to_save`."""
    shard_copies(wrapper.modules_to_save, "modules_to_save", site)


def shard_ia3(tuner: Any, site: Site) -> None:
    """Shards new adapters of an (IA)3 layer."""
    factors, vectors = site.factors(), tuner.ia3_l
    factor = None if factors is None else factors.a if tuner.is_feedforward else factors.b
    for adapter in list(vectors.keys()):
        inner = f"ia3_l.{adapter}"
        if site.has_sharding(inner):
            continue
        placement = Placement() if factor is None else factor.along(1 if tuner.is_feedforward else 0)
        site.place(vectors, adapter, inner, placement, GradientRule() if factor is None else factor.rule)
    if factor is not None and not site.is_off_stage:
        vectors.__class__ = LocalDict
        vectors.forwards, vectors.group = site.forwards, None
        if factor.rule.sum is not None:
            copies, mesh = factor.rule.copies, site.state.mesh
            vectors.group = mesh.tp_group if copies is None else mesh.copies_group(copies)


@dataclass(frozen=True)
class _Kind:
    """A PEFT layer class: the path of the wrapped module, and the function that shards its adapters."""

    base: str
    shard_model: Callable[[Any, Site], None]
    # Whether adapters are copies of the wrapped module, including its hooks, that are called instead of it.
    has_copies: bool = False


_KINDS: Mapping[str, _Kind] = {
    "ParamWrapper": _Kind("base_layer", shard_parameter),
    "LoraLayer": _Kind("base_layer", shard_lora),
    "IA3Layer": _Kind("base_layer", shard_ia3),
    "LNTuningLayer": _Kind("base_layer", shard_norms, has_copies=True),
    "ModulesToSaveWrapper": _Kind("original_module", shard_saved, has_copies=True),
    "TrainableTokensWrapper": _Kind("token_adapter.base_layer", shard_tokens),
    "TrainableTokensLayer": _Kind("base_layer", shard_tokens),
}


def _kind(module: nn.Module) -> _Kind | None:
    return next((_KINDS[base.__name__] for base in type(module).__mro__ if base.__name__ in _KINDS), None)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any, _Kind]]:
    """Yields names, modules and kinds of a model's adapted modules."""
    inside_wrappers = set()
    for name, module in model.named_modules():
        if (kind := _kind(module)) is not None and module not in inside_wrappers:
            inside_wrappers.add(tokens_layer(module))
            yield name, module, kind


def require_rules(state: ParallelState, targets: list[str]) -> None:
    """Raises `UnsupportedError` for target linears whose style has no rule for adapters."""
    for name in targets:
        linear_factors(state, name, f"{name}.weight")


def require_parameter_rule(state: ParallelState, name: str, module: nn.Module) -> None:
    """Raises `UnsupportedError` for a target parameter that its module cannot read with adapter updates."""
    sharding = state.shardings[name]
    is_split = sharding.placement.on(state.axes).is_split
    if isinstance(module, Placeholder) or not (is_split or NAME in state.placed):
        return
    if not isinstance(module, LocalParameters):
        raise UnsupportedError(
            f"LoraConfig.target_parameters names {name} ({type(module).__name__}), which is not supported for linears "
            "of a tensor-parallel model. Use target_modules instead, or load the model with tp_size=1."
        )
    if len(sharding.shape) == 2 and (is_split or name.rpartition(".")[2] in module.addends):
        raise UnsupportedError(
            f"LoraConfig.target_parameters names {name}, a sharded 2-D parameter (such as a bias of experts) that PEFT "
            "would treat as one matrix. Leave it out, or load the model with tp_size=1 and ep_size=1."
        )


def shard_adapters(model: nn.Module, state: ParallelState) -> None:
    """Registers the shardings of adapters that PEFT has added since the last call, and shards them."""
    adapted = list(_adapted(model))
    for name, tuner, kind in adapted:
        parameters = dict(tuner.get_submodule(kind.base).named_parameters())
        if not any(f"{name}.{kind.base}.{param_name}" in state.shardings for param_name in parameters):
            # Both ends of a pipeline share trained tokens; other adapters of a tied weight are rejected by its name.
            is_shared = kind.shard_model is shard_tokens
            _rename_shardings(state, name, f"{name}.{kind.base}", rename_ties=is_shared)
    copies = count_shared_copies(state.shardings.values(), state.axes)
    for name, tuner, kind in adapted:
        base = innermost = tuner.get_submodule(kind.base)
        while (inner := _kind(innermost)) is not None:
            innermost = innermost.get_submodule(inner.base)
        on_other_stage = isinstance(innermost, Placeholder)
        kind.shard_model(tuner, Site(name, base, f"{name}.{kind.base}", state, copies, on_other_stage))
        if on_other_stage and has_own_tokens(tuner):
            innermost.list_around(tuner)
        if not kind.has_copies:
            _move_hooks(state.hooks, base, tuner)
    _follow(model, state, {name: tuner for name, tuner, _ in adapted})


def note_modules(model: nn.Module, state: ParallelState) -> None:
    """Updates the parallel state for modules that were added to a model."""
    _follow(model, state, {})


def forget_adapters(
    model: nn.Module, state: ParallelState, before: Mapping[str, tuple[nn.Module, dict[int, str]]]
) -> None:
    """Updates the parallel state after PEFT has replaced adapted modules.

    Args:
        model: the model without the adapters.
        state: state of the model.
        before: result of `insides` before the replacement.
    """
    there = {name: model.get_submodule(name) for name in before}
    for name, module in there.items():
        tuner, names = before[name]
        inner = names.get(id(module))
        # A head no longer reads trained tokens.
        vars(module).pop("weight_update", None)
        if inner is None:
            raise UnsupportedError(f"{name} was replaced by a new {type(module).__name__} that has no sharding.")
        if inner:
            _rename_shardings(state, f"{name}.{inner}", f"{name}\0")
            _forget(state, [sharding for sharding in state.shardings if sharding.startswith(f"{name}.")])
            _rename_shardings(state, f"{name}\0", name)
            _move_hooks(state.hooks, tuner, module)
    _follow(model, state, there)


def forget_deleted(model: nn.Module, state: ParallelState) -> None:
    """Updates the parallel state after PEFT has deleted an adapter."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    is_adapter = {name: sharding.style == ADAPTER for name, sharding in state.shardings.items()}
    _forget(state, [name for name in is_adapter if is_adapter[name] and name not in names])
    note_modules(model, state)


def _forget(state: ParallelState, names: list[str]) -> None:
    """Removes the shardings of adapters' parameters, and their ties over pipeline stages."""
    for name in names:
        del state.shardings[name]
    if state.cut is not None:
        state.cut.retie(tuple(name for name in state.cut.tied if name not in names), state.cut.sources)


def insides(model: nn.Module) -> dict[str, tuple[nn.Module, dict[int, str]]]:
    """Returns a model's outermost adapted modules by name, each with the names of its submodules by identity."""
    outermost: dict[str, tuple[nn.Module, dict[int, str]]] = {}
    for name, tuner, _ in _adapted(model):
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = tuner, {id(module): inner for inner, module in tuner.named_modules()}
    return outermost


def _follow(model: nn.Module, state: ParallelState, modules: Mapping[str, nn.Module]) -> None:
    """Updates names, user-hook checks and the data-parallel engine for replaced modules, given by name."""
    if state.cut is not None:
        listed = model.state_dict()
        off_stage = {name for name, tensor in listed.items() if is_off_stage(tensor)}
        state.names = WeightNames(tuple(listed), state.names.off_stage | off_stage)
    for guard in state.placed.get(GUARDS, ()):
        guard.follow(modules)
    assert state.data_parallel is not None
    state.data_parallel.scan()


def _rename_shardings(state: ParallelState, before: str, after: str, *, rename_ties: bool = True) -> None:
    """Renames the shardings of a module that was wrapped or unwrapped, and its weights tied over pipeline stages."""

    def rename(name: str) -> str:
        return f"{after}.{name.removeprefix(f'{before}.')}" if name.startswith(f"{before}.") else name

    renamed = {rename(name): replace(sharding, name=rename(name)) for name, sharding in state.shardings.items()}
    state.shardings.clear()
    state.shardings.update(renamed)
    if rename_ties and state.cut is not None:
        sources = {rename(name): rename(source) for name, source in state.cut.sources.items()}
        state.cut.retie(tuple(map(rename, state.cut.tied)), sources)


def _move_hooks(hooks: ForwardHooks, source: nn.Module, target: nn.Module) -> None:
    """Moves hooks on the input and output of a linear that is a block of its own to its adapter layer."""
    for owner in hooks.owners(source):
        if isinstance(owner, LatentWithRotary | UniformRegion | FullSequenceRegion):
            hooks.remove_from(source, owner)
            owner.install(target, hooks)
