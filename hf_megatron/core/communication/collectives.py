"""Collectives as standalone autograd nodes, separate from the matmuls that hold the weights.

All functions take and return local tensors. They correspond to Megatron's `tensor_parallel/mappings.py`:

| function | forward | backward |
|---|---|---|
| `copy_to_ranks` | identity | all-reduce |
| `reduce_from_ranks` | all-reduce | identity |
| `split_over_ranks` | slice | all-gather |
| `gather_from_ranks` | all-gather | slice, or reduce-scatter if each rank's gradient is one term of the sum |
| `reduce_scatter_to_ranks` | reduce-scatter | all-gather |

The split dim may have any size: the first ranks hold `ceil(size / ranks)` entries, the last may hold none. Messages
are padded to equal lengths; the padding never leaves this file.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_autograd import once_differentiable, run_function
from ...compat.torch_distributed import (
    all_gather_flat,
    all_gather_into_parts,
    all_reduce_,
    all_to_all_flat,
    gathers_into_parts,
    get_rank_and_size,
    reduce_scatter_flat,
    uses_gloo,
)
from ...errors import UnsupportedError


def padded_shard_size(size: int, ranks: int) -> int:
    """Returns the number of entries of a dim that the first rank holds, to which shorter shards are padded."""
    return -(-size // ranks)


def bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the `[start, stop)` range of a dim's entries that `rank` holds."""
    width = -(-size // ranks)
    return min(rank * width, size), min((rank + 1) * width, size)


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [0, missing])


def all_gather(tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """All-gathers the ranks' shards `[..., held, ...]` into `[..., size, ...]` along `dim`; not differentiable."""
    _, ranks = get_rank_and_size(group)
    padded = -(-size // ranks)
    if padded * ranks == size:
        shard = tensor.contiguous()
        if padded and gathers_into_parts(group):
            return all_gather_into_parts(shard, dim, group)
        # A dim whose shards are stored one after the other, as for a batch of one sequence.
        if dim == 0 or (dim == 1 and shard.shape[0] == 1):
            # Into the result's own memory. Never a view: models modify it in place.
            return all_gather_flat(shard, group, (*shard.shape[:dim], size, *shard.shape[dim + 1 :]))
        return torch.cat(all_gather_flat(shard, group).chunk(ranks), dim)
    # The collective needs equal lengths: pad `held` to `ceil(size / ranks)`; gathered is [ranks, ..., padded, ...].
    shard = _pad(tensor, dim, padded).contiguous()
    gathered = all_gather_flat(shard, group).view(ranks, *shard.shape)
    held = [bounds(size, ranks, rank) for rank in range(ranks)]
    # Trim before concatenating, so that the result is contiguous: models reshape it with `view`.
    return torch.cat([gathered[rank].narrow(dim, 0, stop - start) for rank, (start, stop) in enumerate(held)], dim)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatters `[..., size, ...]` into this rank's shard of `dim`; not differentiable."""
    (rank, ranks), size = get_rank_and_size(group), tensor.shape[dim]
    held = -(-size // ranks)
    padded = tensor if held * ranks == size else _pad(tensor, dim, held * ranks)
    # `parts` stacks the shards along dim 0, [ranks * first dim of a shard, ...]: rank i receives the i-th of them.
    if dim == 0:
        parts = padded.contiguous()
    elif dim == 1 and padded.shape[0] == 1:
        parts = padded.contiguous().view(ranks, held, *padded.shape[2:])
    else:
        parts = torch.cat(padded.chunk(ranks, dim))
    if uses_gloo(group):
        # An all-to-all followed by a local sum takes half to a third of the time of gloo's own reduce-scatter (two
        # ranks on one machine, 16 KiB to 8 MiB).
        received = all_to_all_flat(parts, group)
        if ranks == 2:
            result = torch.add(*received.chunk(2))
        else:
            result = received.view(ranks, received.shape[0] // ranks, *received.shape[1:]).sum(0)
    else:
        result = reduce_scatter_flat(parts, group)
    if padded is tensor:
        return result
    start, stop = bounds(size, ranks, rank)
    # Never a view: models modify it in place.
    return result if stop - start == held else result.narrow(dim, 0, stop - start).clone()


def take_shard(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's shard of `dim` of `[..., size, ...]`, as a view."""
    rank, ranks = get_rank_and_size(group)
    start, stop = bounds(tensor.shape[dim], ranks, rank)
    return tensor.narrow(dim, start, stop - start)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, is_addend: bool) -> Tensor:
        ctx.group, ctx.is_addend = group, is_addend
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # autograd may share the gradient with the other addend: an in-place all-reduce needs a copy.
        grad = gradient.clone(memory_format=torch.contiguous_format) if ctx.is_addend else gradient.contiguous()
        return all_reduce_(grad, ctx.group), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A dynamo graph cannot mark its input as dirty.
        if torch.compiler.is_dynamo_compiling() or not tensor.is_contiguous():
            return all_reduce_(tensor.contiguous(), group)
        # Reduced in place: the partial sums are not needed again.
        ctx.mark_dirty(tensor)
        return all_reduce_(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, tensor.shape[dim], group
        return take_shard(tensor, dim, group).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.dim, ctx.size, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup, sum_gradient: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.sum_gradient = dim, group, sum_gradient
        return all_gather(tensor, dim, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.sum_gradient:
            # The next operation is computed on each rank's shard: the gradient terms [..., size, ...] are summed over
            # the ranks, and each rank keeps the gradient of its own shard [..., held, ...].
            gradient = reduce_scatter(gradient, ctx.dim, ctx.group)
        else:
            # The gradient is already complete on every rank: slice it.
            gradient = take_shard(gradient, ctx.dim, ctx.group).contiguous()
        return gradient, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, tensor.shape[dim], group
        return reduce_scatter(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # All ranks' addends have the same gradient [..., size, ...]: gather it from the shards [..., held, ...].
        return all_gather(gradient, ctx.dim, ctx.size, ctx.group), None, None


def reject_second_derivatives() -> None:
    """Raises `UnsupportedError` in the backward of a vocab-parallel head's loss with `create_graph=True`.

    Called by losses that save tensors without differentiating through them; `once_differentiable` only checks the
    incoming gradients.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "create_graph=True is not supported with a vocab-parallel head: its loss cannot be differentiated twice. "
            "Load the model with tp_size=1 in a job of one rank."
        )


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup, *, is_addend: bool = False) -> Tensor:
    """Returns a replicated tensor of any shape for sharded computation; its gradient is all-reduced.

    Set `is_addend=True` if the result may be an operand of an addition: autograd then passes the same gradient tensor
    to both operands, so it must not be reduced in place.
    """
    return run_function(_Copy, tensor, group, is_addend) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def reduce_from_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduces a tensor of any shape, in place if it is contiguous; its gradient is passed through."""
    return run_function(_Reduce, tensor, group)


def split_over_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's shard of `dim` of a replicated tensor `[..., size, ...]`; its gradient is all-gathered."""
    return run_function(_Split, tensor, dim, group)


def gather_from_ranks(
    tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup, *, sum_gradient: bool = False
) -> Tensor:
    """All-gathers the ranks' shards `[..., held, ...]` along `dim` into `[..., size, ...]`.

    Use `sum_gradient=True` if the following computation differs between ranks, so that each holds one term of the
    gradient; `False` if it is replicated and every rank holds the full gradient.
    """
    return run_function(_Gather, tensor, dim, size, group, sum_gradient)


def reduce_scatter_to_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatters `[..., size, ...]` into this rank's shard of `dim`; its gradient is all-gathered."""
    return run_function(_ReduceScatter, tensor, dim, group)
