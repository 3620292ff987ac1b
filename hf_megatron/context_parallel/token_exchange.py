"""Tokens that change ranks, each a collective with its gradient.

| function | forward | backward |
|---|---|---|
| `take_tokens` | this rank's tokens of a replicated row | zeros for the others' |
| `gather_tokens` | the whole row, in its own order | the sum over the ranks, this rank's tokens of it |
| `scatter_tokens` | this rank's tokens of the sum over the ranks | the whole row |
| `to_heads` | some tokens of all heads -> all tokens of some heads | the other way |
| `to_tokens` | the other way | as `to_heads` |

Ranks hold unequal numbers of tokens. What is gathered travels padded to equal sizes, which nobody sees outside of this
file; heads are exchanged, and a ring sends, as much as there is.
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
    """Keeps a rank's tokens of `dim` of `[..., length, ...]`, in ascending order."""
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
        return _summed_tokens(gradient, ctx.dim, ctx.order, ctx.group), None, None, None


def _joined_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    width = max(order.sizes)
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, width - tensor.shape[dim]]).contiguous()
    parts = all_gather_flat(padded, group).view(order.ranks, *padded.shape)
    joined = parts.movedim(0, dim).flatten(dim, dim + 1)
    return joined.index_select(dim, order.natural.to(tensor.device))


def _summed_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    shape = [*tensor.shape]
    shape[dim] = max(order.sizes) * order.ranks
    joined = tensor.new_zeros(shape).index_copy_(dim, order.natural.to(tensor.device), tensor)
    own = reduce_scatter(joined, dim, group)
    return own.narrow(dim, 0, order.sizes[dist.get_rank(group)])


def gather_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    """Joins the ranks' tokens `[..., held, ...]` of `dim` to the row `[..., length, ...]`, in the row's order.

    The gradients of the ranks are summed: each counts what it made of the row by itself.
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
        return _joined_tokens(gradient, ctx.dim, ctx.order, ctx.group), None, None, None


def scatter_tokens(tensor: Tensor, dim: int, order: SequenceOrder, group: dist.ProcessGroup) -> Tensor:
    """Sums the ranks' rows `[..., length, ...]` and keeps a rank's tokens of `dim`; the reverse of `gather_tokens`."""
    return _ScatterTokens.apply(tensor, dim, order, group)


def _all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Sends one tensor to each rank and returns as many flat ones of these sizes."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, list(sizes), [part.numel() for part in parts], group=group)
    return list(received.split(list(sizes)))


def _spread_heads(tensor: Tensor, tokens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gives `[batch, heads / ranks, sum of tokens, width]` for `[batch, heads, held, width]`."""
    parts = tensor.chunk(len(tokens), dim=1)
    batch, heads, _, width = parts[0].shape
    received = _all_to_all(parts, [batch * heads * held * width for held in tokens], group)
    return torch.cat([part.view(batch, heads, held, width) for part, held in zip(received, tokens, strict=True)], 2)


def _spread_tokens(tensor: Tensor, tokens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gives `[batch, heads, held, width]` for `[batch, heads / ranks, sum of tokens, width]`."""
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
    """Exchanges `[batch, heads, held, width]` for `[batch, heads / ranks, sum of tokens, width]` (Ulysses).

    Args:
        tokens: that each rank of the group holds; those of the result stand in the order of the ranks.
    """
    return _ToHeads.apply(tensor, tokens, group)


def to_tokens(tensor: Tensor, tokens: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Exchanges `[batch, heads / ranks, sum of tokens, width]` for `[batch, heads, held, width]`."""
    return _ToTokens.apply(tensor, tokens, group)


class Passing:
    """A tensor on its way to the next rank of a ring, and another one that comes from the rank before.

    Args:
        tensor: flat; must stay as it is until `wait()` has returned.
        size (`int`): of what comes.
    """

    def __init__(self, tensor: Tensor, size: int, group: dist.ProcessGroup):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.arriving = tensor.new_empty(size)
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        operations = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
            dist.P2POp(dist.irecv, self.arriving, group=group, group_peer=before),
        ]
        # A rank may hold no token; nothing is not sent.
        wanted = [op for op, count in zip(operations, (tensor.numel(), size), strict=True) if count]
        self.works = dist.batch_isend_irecv(wanted) if wanted else []

    def wait(self) -> Tensor:
        """Returns what came, flat."""
        for work in self.works:
            work.wait()
        return self.arriving
