"""Gathers full tensors from any layout, one at a time, in CPU memory of one rank.

The ranks of a parameter's stage send their shards to the stage's first rank, which sends the full tensor to rank 0.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..compat.torch_dtensor import local_tensor
from ..compat.transformers_loading import untied_state_dict
from ..core.communication.rank_errors import propagate_errors
from ..core.mesh import ParallelMesh
from ..core.off_stage import local_named_parameters, own_state_dict
from ..core.placement import Placement
from ..data_parallel.fsdp import full_local
from ..parallel_state import ParallelState, parallel_state, unwrap_parallel_model
from .stage_consistency import OwnedTensor, check_copies, in_order, join_stages, merge_owned_tensors, tied_weights


class Staging:
    """Two alternating buffers for gathered tensors: one is filled while the other is written to disk.

    New memory for each tensor would be mapped and zeroed page by page, which takes as long as the gather.
    """

    def __init__(self, largest: int):
        self.buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the next buffer as a tensor of any shape that fits it."""
        self.buffers.reverse()
        return self.buffers[0][: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def gather_to_first(
    parameter: Tensor,
    placement: Placement,
    mesh: ParallelMesh,
    staging: Staging | None = None,
    local: Tensor | None = None,
) -> Tensor | None:
    """Gathers a full tensor of any shape in CPU memory of the first of its ranks; returns `None` on the others.

    Called by all ranks that hold the tensor, in the same order. With `staging` the result is valid until the second
    call after this one. `local` overrides the parameter's own local shard.
    """
    axes, rank = mesh.axes, mesh.axes.world_rank
    ranks = placement.split_over(axes).ranks(rank)
    first = ranks[0]
    local = local_tensor(parameter).detach() if local is None else local
    if not placement.is_split:
        return local.cpu()
    # Only the first of several ranks with the same shard sends it.
    parts: dict[str, int] = {}
    for other in ranks:
        parts.setdefault(str(placement.intervals(parameter.shape, axes.of_rank(other))), other)
    senders = list(parts.values())
    group = mesh.group(placement.splits[0].axis) if len(placement.splits) == 1 else None
    if rank != first:
        if rank in senders and local.numel():
            dist.send(local.contiguous(), first, group=group)
        return None
    full = _room(parameter.shape, parameter.dtype, staging)
    for sender in senders:
        shape = placement.local_shape(parameter.shape, axes.of_rank(sender))
        if not math.prod(shape):
            continue
        places = list(placement.blocks(parameter.shape, axes.of_rank(sender)))
        piece = local
        if sender != rank:
            direct = full[places[0][0]]
            if len(places) == 1 and direct.is_contiguous() and local.device.type == "cpu":
                dist.recv(direct, sender, group=group)
                continue
            piece = torch.empty(shape, dtype=parameter.dtype, device=local.device)
            dist.recv(piece, sender, group=group)
        for place, part in places:
            full[place].copy_(piece[part])
    return full


def _room(shape: torch.Size, dtype: torch.dtype, staging: Staging | None) -> Tensor:
    return torch.empty(shape, dtype=dtype) if staging is None else staging.take(shape, dtype)


def gather_parameter(model: Any, name: str, value: Tensor, staging: Staging | None = None) -> Tensor | None:
    """Gathers a full parameter, or its gradient, of any shape in CPU memory of the stage's first rank; else `None`.

    Called by every rank of the stage.
    """
    state = parallel_state(model)
    assert state is not None
    placement, local = state.placement(name), None
    if state.shards(name) and isinstance(value, DTensor):
        local = full_local(value, placement.local_shape(value.shape, state.axes), state.mesh, state.average(name))
    if placement.split_over(state.axes).ranks(state.axes.world_rank)[0] != state.axes.ranks("stage")[0]:
        # The tensor is gathered by another group of ranks.
        return None
    return gather_to_first(value, placement, state.mesh, staging, local)


def fetch(
    model: Any,
    state: ParallelState,
    name: str,
    entry: OwnedTensor,
    value: Tensor | None,
    staging: Staging | None = None,
) -> Tensor | None:
    """Gathers a tensor of any shape and stage in CPU memory of rank 0; returns `None` on other ranks. Collective.

    Args:
        value: this rank's local shard; not used on other stages.
    """
    mesh, full = state.mesh, None
    if entry.owner == mesh.pp_rank:
        assert value is not None
        full = gather_parameter(model, name, value, staging)
    if entry.owner == 0 or mesh.axes.rank("stage") > 0:
        return full
    if full is not None:
        if full.numel():
            # Second hop: from the owning stage's first rank to rank 0, over the pipeline group.
            dist.send(full.to(mesh.device).contiguous(), group=mesh.pp_group, group_dst=0)
        return None
    return _receive(entry, mesh, staging) if mesh.pp_rank == 0 else None


def _receive(entry: OwnedTensor, mesh: ParallelMesh, staging: Staging | None) -> Tensor:
    full = _room(torch.Size(entry.shape), entry.dtype, staging)
    if not full.numel():
        return full
    arriving = full if mesh.device.type == "cpu" else torch.empty_like(full, device=mesh.device)
    dist.recv(arriving, group=mesh.pp_group, group_src=entry.owner)
    return full if arriving is full else full.copy_(arriving)


def full_state_dict(model: Any) -> dict[str, Tensor]:
    """Returns the full state dict, of any shapes, in CPU memory of rank 0 and an empty one on other ranks; collective.

    Raises:
        CheckpointError: pipeline stages hold different copies of a tied weight.
    """
    state, inner = parallel_state(model), unwrap_parallel_model(model)
    assert state is not None
    if inner is not model:
        prefix = next(name for name, module in model.named_modules() if module is inner)
        return {f"{prefix}.{name}": tensor for name, tensor in full_state_dict(inner).items()}
    check_copies(state, tied_weights(model))
    tensors = own_state_dict(model)
    parameters = dict(local_named_parameters(model, remove_duplicate=False))
    names: dict[int, str] = {}
    first = {name: names.setdefault(id(parameters.get(name, tensor)), name) for name, tensor in tensors.items()}
    # Only the head's stage knows the name of the weight it is tied to.
    first = join_stages(state, {name: other for name, other in first.items() if name != other})
    owned_tensors = merge_owned_tensors(state, {name: tensor for name, tensor in tensors.items() if name not in first})
    fetched = ((name, fetch(model, state, name, entry, tensors.get(name))) for name, entry in owned_tensors.items())
    gathered = {name: full for name, full in fetched if full is not None}
    if not gathered:
        return {}
    order = in_order(state, [*owned_tensors, *first]) if state.names.all else tensors
    return {name: gathered[first.get(name, name)] for name in order}


def stream_weights(model: Any) -> tuple[dict[str, OwnedTensor], Callable[[str], Tensor | None]]:
    """Returns the tensors that `save_pretrained` would write, and a function that gathers one of them on rank 0.

    The function is collective, with the same names in the same order on every rank; it returns a tensor of any shape,
    `None` off rank 0. For a model that is not parallelized it returns the model's own tensors on every rank.

    Raises:
        CheckpointError: weights are shared that the class does not tie, or pipeline stages hold different copies of a
            tied weight.
    """
    state = parallel_state(model)
    with propagate_errors("Saving"):
        tensors = untied_state_dict(model, own_state_dict(model))
    if state is None:
        described = {name: OwnedTensor(0, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        return described, lambda name: tensors[name].cpu()
    check_copies(state, tied_weights(model))
    owned_tensors = merge_owned_tensors(state, tensors)
    return owned_tensors, lambda name: fetch(model, state, name, owned_tensors[name], tensors.get(name))
