"""Gathers full tensors from `DTensor`s, and extracts local shards from full tensors.

torch's own arithmetic is wrong for many sizes of a dim that is split by both TP and FSDP2, so it is reimplemented
here: FSDP2 splits the shard that the other axes leave on a rank.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...compat.tensor_lists import share_specs
from ...compat.torch_dtensor import count_shard_blocks, dtensor_from_local, local_tensor, split_dim
from ...errors import ConfigError, UnsupportedError
from ..mesh import is_weight_axis
from .collectives import bounds

_Range = tuple[int, int]


def is_split_along(tensor: DTensor, dim: int) -> bool:
    """Returns whether ranks hold different shards of a dim of a tensor of any shape."""
    return any(not placement.is_replicate() and split_dim(placement) == dim for placement in tensor.placements)


def placed_gradient(parameter: Tensor) -> Tensor | None:
    """Returns a parameter's gradient, of any shape, first redistributed to the parameter's placements if they differ.

    Collective over the ranks that share the parameter.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        # The gradient was computed by the training loop and not by backward.
        parameter.grad = dtensor_from_local(shard_like(gather_full_tensor(gradient), parameter), parameter)
    return parameter.grad


def list_placed_gradients(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns `placed_gradient` of each of these parameters, of any shape."""
    gradients = [parameter.grad for parameter in parameters]
    if share_specs(gradients, parameters):
        return gradients
    return [placed_gradient(parameter) for parameter in parameters]


@torch.no_grad()
def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Returns a full copy `[...]` of a tensor on every rank of its mesh; collective."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        # Partial sums are all-reduced by torch; the block arithmetic below only applies to shards.
        return local_tensor(tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim))
    local = local_tensor(tensor).detach()
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return local.clone()
    # Each rank writes its blocks into zeros; summing over the split axes then fills in the other ranks' blocks. Unlike
    # an all-gather, this works for any sizes and any nesting of the splits.
    unsharded = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    for here, there in _blocks(tensor):
        unsharded[there] = local[here]
    # One all-reduce per split axis; replicated axes hold the same blocks, which must not be summed.
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(unsharded, group=tensor.device_mesh.get_group(axis))
    return unsharded


@torch.no_grad()
def copy_local_shard(unsharded: Tensor, tensor: DTensor) -> None:
    """Copies this rank's shard of a full tensor into a `DTensor`, both `[...]` of the same global shape."""
    local = local_tensor(tensor)
    for here, there in _blocks(tensor):
        local[here] = unsharded[there]


def shard_like(unsharded: Tensor, like: DTensor) -> Tensor:
    """Copies this rank's shard out of a full tensor, with the sharding of `like` of the same global shape `[...]`."""
    local = unsharded.new_empty(local_tensor(like).shape)
    for here, there in _blocks(like):
        local[here] = unsharded[there]
    return local


def accept_full_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Converts full tensors of any shape in a state dict to local shards; a pre-hook of `load_state_dict`.

    Raises:
        ConfigError: a tensor has another global shape.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
            continue
        if value.shape != parameter.shape:
            raise ConfigError(
                f"load_state_dict: {name} has shape {tuple(value.shape)}, the global shape is {tuple(parameter.shape)}."
            )
        state_dict[prefix + name] = dtensor_from_local(shard_like(value, parameter).to(parameter.device), parameter)


def _blocks(tensor: DTensor) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yields each contiguous block of this rank's shard: its slices in the shard and in the full tensor."""
    held = held_ranges(tensor)
    here = []
    for ranges in held:
        ends = [0]
        for start, stop in ranges:
            ends.append(ends[-1] + stop - start)
        # Ranges of the full tensor are stored back to back in the local shard.
        here.append(list(zip(ends, ends[1:], strict=False)))
    places, origins = product(*here), product(*held)
    for place, origin in zip(places, origins, strict=True):
        yield tuple(slice(*ends) for ends in place), tuple(slice(*ends) for ends in origin)


def held_ranges(tensor: Tensor) -> list[list[_Range]]:
    """Returns for each dim the `[start, stop)` ranges of the full tensor `[...]` that this rank holds."""
    if not isinstance(tensor, DTensor):
        return [[(0, size)] for size in tensor.shape]
    mesh, held = tensor.device_mesh, [[(0, size)] for size in tensor.shape]
    names = mesh.mesh_dim_names or ()
    # FSDP2's axis sorts last: it splits the shard that is left by the others.
    shards = sorted(
        (is_weight_axis(name), axis) for axis, name in enumerate(names) if not tensor.placements[axis].is_replicate()
    )
    for by_fsdp, axis in shards:
        placement = tensor.placements[axis]
        if placement.is_partial():
            raise UnsupportedError(
                "A tensor with a partial placement (pending reduction) cannot be edited. Call full_tensor() and edit "
                "the result."
            )
        # FSDP2's strided placement describes the splits of the other axes; here these have been applied already.
        groups = 1 if by_fsdp else count_shard_blocks(placement)
        dim = split_dim(placement)
        length = sum(stop - start for start, stop in held[dim]) // groups
        # Uneven sizes follow `torch.chunk`, within each of the blocks.
        first, last = bounds(length, mesh.size(axis), mesh.get_local_rank(axis))
        ranges = [(group * length + first, group * length + last) for group in range(groups)]
        held[dim] = [part for one in ranges for part in _cut_out(held[dim], *one)]
    return held


def _cut_out(ranges: list[_Range], first: int, last: int) -> Iterator[_Range]:
    """Yields the subranges that cover entries `[first, last)`, counted over the concatenation of `ranges`."""
    passed = 0
    for start, stop in ranges:
        begin, end = max(first - passed, 0), min(last - passed, stop - start)
        if begin < end:
            yield start + begin, start + end
        passed += stop - start
