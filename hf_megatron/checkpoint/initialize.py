"""Initializes weights that are in no file, with the same global values in every layout for one seed.

`nn.init` on a DTensor draws the same local values on each rank (CPU), or depends on the mesh. Here the model's own
`_init_weights` initializes every module on full tensors with a per-module seed, and each rank keeps its shard; at most
one layer, or one module outside the layers, is unsharded at a time. Without a seed, the first rank creates the full
model as a single process would, and broadcasts it. Modules that a class adds to a checkpoint, such as a classification
head, get the values that a single process would draw.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.torch_dtensor import dtensor_from_local
from ..core.axes import Axes
from ..core.communication.rank_errors import propagate_errors
from ..core.placement import ParameterSharding, Placement
from ..parallel_state import ParallelState


def module_seed(seed: int, name: str) -> int:
    """Returns a seed for a module name that does not depend on the layout."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "big")


def local_part(full: Tensor, placement: Placement, axes: Axes) -> Tensor:
    """Returns this rank's shard of a full tensor of any shape, in its own storage."""
    for split in placement.splits:
        intervals = split.intervals(full.shape[split.dim], axes)
        pieces = [full.narrow(split.dim, start, stop - start) for start, stop in intervals]
        full = torch.cat(pieces, split.dim) if len(pieces) > 1 else pieces[0]
    return full.clone(memory_format=torch.contiguous_format)


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields (name, module, whether to include children): the outermost layers, then other modules with parameters."""
    layers = {
        f"{name}.{index}" if name else index: layer
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, layer in module.named_children()
    }
    outermost = {
        name: layer for name, layer in layers.items() if not any(name.startswith(f"{other}.") for other in layers)
    }
    for name, layer in outermost.items():
        yield name, layer, True
    for name, module in model.named_modules():
        inside = any(name == layer or name.startswith(f"{layer}.") for layer in outermost)
        if module._parameters and not inside:
            yield name, module, False


def _initializer(model: Any, name: str) -> Any:
    """Returns the innermost PreTrainedModel around a module, as composite models have rules for each submodel."""
    # Imported lazily: this module is loaded while transformers' modeling_utils is being imported.
    from transformers import PreTrainedModel

    path = name.split(".") if name else []
    around = (model.get_submodule(".".join(path[:end])) for end in range(len(path), 0, -1))
    return next((module for module in around if isinstance(module, PreTrainedModel)), model)


def initialize(
    model: Any,
    shardings: Mapping[str, ParameterSharding],
    names: set[str],
    *,
    seed: int,
    axes: Axes,
    device: torch.device,
) -> None:
    """Initializes placeholders of a parallelized model with the values that `model._init_weights` draws.

    Args:
        names (`set[str]`): parameters to initialize; all others keep their values.
        seed (`int`): the same seed gives the same global weights in every layout.
        device (`torch.device`): device of the shards.
    """
    done: dict[int, nn.Parameter] = {}
    for unit_name, unit, recurse in list(_units(model)):
        originals = {
            name: parameter
            for name, parameter in unit.named_parameters(prefix=unit_name, recurse=recurse, remove_duplicate=False)
            if name in names
        }
        if not originals:
            continue
        for name, original in originals.items():
            _set(model, name, nn.Parameter(torch.empty(original.shape, dtype=original.dtype), original.requires_grad))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            modules = list(unit.named_modules(prefix=unit_name)) if recurse else [(unit_name, unit)]
            # Children first: some architectures overwrite a child's weights in the parent's rule (GPT-2's c_proj).
            for name, module in reversed(modules):
                torch.manual_seed(module_seed(seed, name))
                _initializer(model, name)._init_weights(module)
        for name, original in originals.items():
            full = model.get_parameter(name).detach()
            if id(original) not in done:
                local = local_part(full, shardings[name].placement, axes).to(device)
                value = dtensor_from_local(local, original) if isinstance(original, DTensor) else local
                done[id(original)] = nn.Parameter(value, original.requires_grad)
                done[id(original)]._is_hf_initialized = True  # type: ignore[attr-defined]
            _set(model, name, done[id(original)])
    _mark_initialized(model)


def _mark_initialized(model: nn.Module) -> None:
    """Marks modules whose weights and buffers have all been filled, so that transformers does not draw them again."""
    for module in model.modules():
        # Some `_init_weights` write in place without checking whether a parameter was loaded; DTensors may reject
        # that.
        tensors = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        if tensors and all("_is_hf_initialized" in vars(tensor) for tensor in tensors):
            module._is_hf_initialized = True  # type: ignore[assignment]


def initialize_missing(model: Any, state: ParallelState, names: set[str]) -> None:
    """Initializes placeholders of a parallelized model, on each rank the local ones; collective.

    A model without loaded weights gets those of `state.create_stock_model`, or with a seed, of `initialize`. Modules
    that a class adds to a checkpoint, and those whose weights have another shape in it, get the values that a single
    process would draw: the generator of rank 0 is broadcast, draws in transformers' order, stage by stage of a
    pipeline, and ends in the state that it would have in a single process.
    """
    # The loader may consider a tied weight loaded.
    tied = getattr(model, "all_tied_weights_keys", {})
    all_missing = all(name in names or name in tied for name, _ in model.named_parameters(remove_duplicate=False))
    cut = state.cut
    # Pipeline rank -> its missing weights; tied ones are drawn with the first stage's by both ranks that hold them.
    by_owner: dict[int, set[str]] = {}
    for name in names:
        by_owner.setdefault(0 if cut is None else cut.owner(name), set()).add(name)
    ranks: list[tuple[set[int], bool]] = [(set(), False)] * dist.get_world_size()
    dist.all_gather_object(ranks, (set(by_owner), all_missing))
    if all(all_missing for _, all_missing in ranks):
        if state.create_stock_model is not None and state.config.seed is None:
            return _broadcast_stock_model(model, state, names)
        seed, device = state.config.seed or 0, state.mesh.device
        return initialize(model, state.shardings, names, seed=seed, axes=state.axes, device=device)
    # Each stage continues with the generator of the one before it, and at the end all adopt the last one's.
    source, owners = 0, sorted({owner for some, _ in ranks for owner in some})
    for owner in owners:
        share_generator(source)
        _draw_next(model, state, by_owner.get(owner, set()))
        source = next(rank for rank, (some, _) in enumerate(ranks) if owner in some)
    if owners:
        share_generator(source)


def _draw_next(model: Any, state: ParallelState, names: set[str]) -> None:
    originals = {name: model.get_parameter(name) for name in names}
    for name, original in originals.items():
        _set(model, name, nn.Parameter(torch.empty(original.shape, dtype=original.dtype), original.requires_grad))
    with torch.no_grad():
        for name, module in _children_first(model):
            if any(f"{name}.{leaf}".lstrip(".") in names for leaf in module._parameters):
                _initializer(model, name)._init_weights(module)
    placed: dict[int, nn.Parameter] = {}
    for name, original in originals.items():
        _place(model, state, name, original, model.get_parameter(name).detach(), placed)


def _place(
    model: nn.Module, state: ParallelState, name: str, original: Any, full: Tensor, placed: dict[int, nn.Parameter]
) -> None:
    """Replaces a placeholder by this rank's shard of a full weight; names of one placeholder share a parameter."""
    if id(original) not in placed:
        local = local_part(full, state.placement(name), state.axes).to(state.mesh.device, original.dtype)
        value = dtensor_from_local(local, original) if isinstance(original, DTensor) else local
        placed[id(original)] = nn.Parameter(value, original.requires_grad)
        placed[id(original)]._is_hf_initialized = True  # type: ignore[attr-defined]
    _set(model, name, placed[id(original)])


def _broadcast_stock_model(model: nn.Module, state: ParallelState, names: set[str]) -> None:
    """Fills a model with the weights that a single process draws; only the first rank holds all of them."""
    assert state.create_stock_model is not None
    weights: dict[str, Tensor] = {}
    with propagate_errors("Creating the full model on the first rank"):
        if dist.get_rank() == 0:
            weights = dict(state.create_stock_model().named_parameters(remove_duplicate=False))
    share_generator(0)
    described = [[(name, weight.shape, weight.dtype) for name, weight in weights.items()]]
    dist.broadcast_object_list(described, src=0)
    originals = {name: model.get_parameter(name) for name in names}
    placed: dict[int, nn.Parameter] = {}
    for name, shape, dtype in described[0]:
        full = torch.empty(shape, dtype=dtype, device=state.mesh.device)
        if name in weights:
            full.copy_(weights[name].detach())
        dist.broadcast(full, src=0)
        if name in originals:
            _place(model, state, name, originals[name], full, placed)
    assert originals.keys() <= {name for name, _, _ in described[0]}
    _mark_initialized(model)


def _children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def share_generator(source: int) -> None:
    """Broadcasts the state of torch's generator from one rank."""
    shared: list[Any] = [torch.get_rng_state()]
    dist.broadcast_object_list(shared, src=source)
    torch.set_rng_state(shared[0])


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    (model.get_submodule(owner) if owner else model)._parameters[leaf] = parameter
