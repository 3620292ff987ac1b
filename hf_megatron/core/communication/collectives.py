"""Collectives as autograd nodes of their own, apart from the matmuls that hold the weights.

Every function takes and returns local tensors. The pairs are those of Megatron's `tensor_parallel/mappings.py`:

| function | forward | backward |
|---|---|---|
| `copy_to_ranks` | identity | all-reduce |
| `reduce_from_ranks` | all-reduce | identity |
| `split_over_ranks` | slice | all-gather |
| `gather_from_ranks` | all-gather | slice, or reduce-scatter where each rank's gradient is a part of the sum |
| `reduce_scatter_to_ranks` | reduce-scatter | all-gather |

The split dim may have any size: the first ranks hold `ceil(size / ranks)` entries, the last may hold none. What travels
is padded to equal shares; the padding is never seen outside this file.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...compat.torch_distributed import all_gather_flat, all_reduce_, all_to_all_flat, reduce_scatter_flat
from ...errors import UnsupportedError


def share(size: int, ranks: int) -> int:
    """Counts the entries of a dim that the first rank holds."""
    return -(-size // ranks)


def bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the `[start, stop)` of a dim's entries that `rank` holds."""
    width = share(size, ranks)
    return min(rank * width, size), min((rank + 1) * width, size)


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [0, missing])


def all_gather(tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Joins the ranks' shards `[..., held, ...]` into `[..., size, ...]` along `dim`; not differentiable."""
    ranks = dist.get_world_size(group)
    shard = _pad(tensor, dim, share(size, ranks)).contiguous()
    gathered = all_gather_flat(shard, group).view(ranks, *shard.shape)
    held = [bounds(size, ranks, rank) for rank in range(ranks)]
    # Trimmed before they are joined, so that the result is contiguous: models reshape it with `view`.
    return torch.cat([gathered[rank].narrow(dim, 0, stop - start) for rank, (start, stop) in enumerate(held)], dim)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sums `[..., size, ...]` over the ranks and keeps this rank's shard of `dim`; not differentiable."""
    ranks, rank, size = dist.get_world_size(group), dist.get_rank(group), tensor.shape[dim]
    padded = _pad(tensor, dim, share(size, ranks) * ranks)
    parts = torch.cat(padded.chunk(ranks, dim)) if dim else padded.contiguous()
    if dist.get_backend(group) == "gloo":
        # Exchanging the parts and adding them here takes half to a third of the time of gloo's own reduce-scatter
        # (two ranks on one machine, 16 KiB to 8 MiB).
        received = all_to_all_flat(parts, group)
        result = received.view(ranks, received.shape[0] // ranks, *received.shape[1:]).sum(0)
    else:
        result = reduce_scatter_flat(parts, group)
    start, stop = bounds(size, ranks, rank)
    # Never a view: models add to it in place.
    return result if stop - start == result.shape[dim] else result.narrow(dim, 0, stop - start).clone()


def take_shard(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's shard of `dim` of `[..., size, ...]`, as a view."""
    start, stop = bounds(tensor.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return tensor.narrow(dim, start, stop - start)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, is_addend: bool) -> Tensor:
        ctx.group, ctx.is_addend = group, is_addend
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient.clone(memory_format=torch.contiguous_format) if ctx.is_addend else gradient.contiguous()
        return all_reduce_(own, ctx.group), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        if torch.compiler.is_compiling():
            return all_reduce_(tensor.contiguous(), group)
        if tensor.is_contiguous():
            ctx.mark_dirty(tensor)
        return all_reduce_(tensor.contiguous(), group)

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
            gradient = reduce_scatter(gradient, ctx.dim, ctx.group)
        else:
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
        return all_gather(gradient, ctx.dim, ctx.size, ctx.group), None, None


def reject_second_derivatives() -> None:
    """Raises `UnsupportedError` in a backward whose gradients shall be differentiated again.

    Called by functions that save what they do not differentiate; `once_differentiable` looks at gradients alone.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "create_graph=True: the loss of a head that is split over ranks cannot be differentiated twice. Load the "
            "model with tp_size=1."
        )


def copy_to_ranks(tensor: Tensor, group: dist.ProcessGroup, *, is_addend: bool = False) -> Tensor:
    """Returns a replicated tensor of any shape, whose gradient is summed over the group, for sharded computation.

    `is_addend=True` where it may be added to another tensor as it is: autograd hands one gradient to both then, which
    is not summed in place.
    """
    return _Copy.apply(tensor, group, is_addend) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def reduce_from_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a tensor of any shape over the group, in place where it can; all continue with the same value."""
    return _Reduce.apply(tensor, group)


def split_over_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Keeps this rank's shard of `dim` of a replicated tensor `[..., size, ...]`."""
    return _Split.apply(tensor, dim, group)


def gather_from_ranks(
    tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup, *, sum_gradient: bool = False
) -> Tensor:
    """Joins the ranks' shards `[..., held, ...]` of `dim` into `[..., size, ...]`.

    `sum_gradient=True` where what follows differs from rank to rank, so that each holds a part of the gradient;
    `False` where every rank computes the same and holds the whole of it.
    """
    return _Gather.apply(tensor, dim, size, group, sum_gradient)


def reduce_scatter_to_ranks(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sums `[..., size, ...]` over the group and keeps this rank's shard of `dim`."""
    return _ReduceScatter.apply(tensor, dim, group)
