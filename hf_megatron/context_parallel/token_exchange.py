"""Collectives over tokens, with their gradients.

| function | forward | backward |
|---|---|---|
| `take_tokens` | this rank's tokens of a replicated sequence | zeros for other ranks' tokens |
| `gather_tokens` | all-gather to the full sequence, in its own order | reduce-scatter to this rank's tokens |
| `scatter_tokens` | reduce-scatter to this rank's tokens | all-gather to the full sequence |
| `to_heads` | all-to-all: some tokens of all heads -> all tokens of some heads | `to_tokens` |
| `to_tokens` | all-to-all: all tokens of some heads -> some tokens of all heads | `to_heads` |

Ranks hold different numbers of tokens. Gathers pad them to equal sizes inside of this file; all-to-alls and rings send
the exact sizes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..compat.torch_distributed import all_gather_flat
from ..core.communication.collectives import reduce_scatter
from .load_balancing import SequenceOrder


def take_tokens(tensor: Tensor, dim: int, order: SequenceOrder, rank: int) -> Tensor:
    """Returns a rank's tokens `[..., local, ...]` of `dim` of `[..., length, ...]`, in ascending order."""
    return torch.cat(
        [tensor.narrow(dim, start, stop - start) for start, stop in order.parts[rank]] or [tensor.narrow(dim, 0, 0)],
        dim,
    )


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
        dim %= tensor.dim()
        ctx.dim, ctx.order, ctx.group = dim, order, group
        return _joined_tokens(tensor, dim, order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # Gradient [..., length, ...] -> sum over ranks -> [..., local, ...].
        return _summed_tokens(gradient, ctx.dim, ctx.order, ctx.group), None, None, None


def _joined_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    # Pad to the largest rank, all-gather [ranks, ..., width, ...], and reorder to the sequence order, which drops the
    # padding: [..., length, ...].
    width = max(order.sizes)
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, width - tensor.shape[dim]]).contiguous()
    parts = all_gather_flat(padded, group).view(order.ranks, *padded.shape)
    # [ranks, ..., width, ...] -> [..., ranks * width, ...]
    joined = parts.movedim(0, dim).flatten(dim, dim + 1)
    return joined.index_select(dim, order.natural.to(tensor.device))


def _summed_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    # The reverse: place tokens in rank order with zeros as padding, reduce-scatter, and drop the padding.
    shape = [*tensor.shape]
    shape[dim] = max(order.sizes) * order.ranks
    joined = tensor.new_zeros(shape).index_copy_(dim, order.natural.to(tensor.device), tensor)
    local = reduce_scatter(joined, dim, group)
    return local.narrow(dim, 0, order.sizes[dist.get_rank(group)])


def gather_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    """Gathers the ranks' tokens `[..., local, ...]` of `dim` to the sequence `[..., length, ...]`, in its order.

    The backward sums the ranks' gradients: each rank has a partial one of the full sequence.
    """
    return _GatherTokens.apply(tensor, dim, order, group)


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
        dim %= tensor.dim()
        ctx.dim, ctx.order, ctx.group = dim, order, group
        return _summed_tokens(tensor, dim, order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # Gradient [..., local, ...] of each rank's tokens -> [..., length, ...] on all ranks.
        return _joined_tokens(gradient, ctx.dim, ctx.order, ctx.group), None, None, None


def scatter_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    """Sums the ranks' `[..., length, ...]` and keeps this rank's tokens of `dim`; the reverse of `gather_tokens`."""
    return _ScatterTokens.apply(tensor, dim, order, group)


def _all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Sends `parts[i]` to rank i and returns the received flat tensors, `sizes[i]` elements from rank i."""
    # Flat buffers, since the ranks' parts have different shapes.
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, list(sizes), [part.numel() for part in parts], group=group)
    return list(received.split(list(sizes)))


def _spread_heads(tensor: Tensor, tokens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Returns `[batch, heads / ranks, sum of tokens, width]` for `[batch, heads, local, width]`."""
    # One chunk of heads for each rank; each rank returns its tokens of our heads.
    parts = tensor.chunk(len(tokens), dim=1)
    batch, heads, _, width = parts[0].shape
    received = _all_to_all(parts, [batch * heads * held * width for held in tokens], group)
    return torch.cat([part.view(batch, heads, held, width) for part, held in zip(received, tokens, strict=True)], 2)


def _spread_tokens(tensor: Tensor, tokens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Returns `[batch, heads, local, width]` for `[batch, heads / ranks, sum of tokens, width]`."""
    # The tokens of each rank go back to it; each rank returns its heads of our tokens.
    batch, heads, _, width = tensor.shape
    held = tokens[dist.get_rank(group)]
    received = _all_to_all(tensor.split(list(tokens), dim=2), [batch * heads * held * width] * len(tokens), group)
    return torch.cat([part.view(batch, heads, held, width) for part in received], 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tokens: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.tokens, ctx.group = tokens, group
        return _spread_heads(tensor, tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _spread_tokens(gradient, ctx.tokens, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tokens: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.tokens, ctx.group = tokens, group
        return _spread_tokens(tensor, tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _spread_heads(gradient, ctx.tokens, ctx.group), None, None


def to_heads(tensor: Tensor, tokens: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """All-to-all from `[batch, heads, local, width]` to `[batch, heads / ranks, sum of tokens, width]` (Ulysses).

    Args:
        tokens: number of tokens of each rank of the group; tokens of the result are in rank order.
    """
    return _ToHeads.apply(tensor, tokens, group)


def to_tokens(tensor: Tensor, tokens: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """All-to-all from `[batch, heads / ranks, sum of tokens, width]` to `[batch, heads, local, width]`."""
    return _ToTokens.apply(tensor, tokens, group)


class Passing:
    """Ring step: sends a tensor to the next rank and receives one from the previous rank, asynchronously.

    Args:
        tensor: flat; must not change until `wait()` has returned.
        size (`int`): number of elements to receive.
    """

    def __init__(self, tensor: Tensor, size: int, group: dist.ProcessGroup):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.arriving = tensor.new_empty(size)
        # Both directions in one batch, so that the ring cannot deadlock.
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        operations = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
            dist.P2POp(dist.irecv, self.arriving, group=group, group_peer=before),
        ]
        # A rank may hold no token; empty tensors are not sent.
        active_ops = [op for op, count in zip(operations, (tensor.numel(), size), strict=True) if count]
        self.works = dist.batch_isend_irecv(active_ops) if active_ops else []

    def wait(self) -> Tensor:
        """Returns the received tensor, flat."""
        for work in self.works:
            work.wait()
        return self.arriving
