"""Attention over tokens that are split over ranks; schemes have the names of Megatron's `cp_comm_type`.

    a2a           all-to-all between heads and tokens: each rank sees all tokens of some heads (Ulysses)
    p2p           keys and values are passed round a ring; each rank merges the blocks its queries see (Ring Attention)
    a2a+p2p       all-to-all among neighbors, then a ring of such groups
    all_gather    keys and values are all-gathered, and their gradients reduce-scattered

One function computes all of them: after the all-to-all, a ring of one or more ranks remains. Keys and values are sent
before the current block is computed and received after it; their gradients follow one step later.
"""

from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import Kernel
from .load_balancing import SequenceOrder
from .masks import MaskBlock, SequenceMask
from .token_exchange import Passing, gather_tokens, take_tokens, to_heads, to_tokens


@dataclass(frozen=True)
class ContextGroups:
    """Process groups of the ranks that split a sequence.

    Args:
        heads (`ProcessGroup`, *optional*): neighbors that exchange heads for tokens by all-to-all.
        ring (`ProcessGroup`, *optional*): ranks that pass keys and values round a ring.
        gathers (`bool`): keys and values are all-gathered over the ring instead.
        all (`ProcessGroup`, *optional*): all ranks that split the sequence.
    """

    heads: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    gathers: bool = False
    all: dist.ProcessGroup | None = None

    @property
    def head_ranks(self) -> int:
        return 1 if self.heads is None else dist.get_world_size(self.heads)

    @property
    def ring_ranks(self) -> int:
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else dist.get_rank(self.ring)

    @property
    def rank(self) -> int:
        """Rank among all that split the sequence; ranks of a head group are consecutive."""
        return self.ring_rank * self.head_ranks + (0 if self.heads is None else dist.get_rank(self.heads))

    def order(self, length: int, documents: tuple[int, ...] = ()) -> tuple[SequenceOrder, SequenceOrder]:
        """Returns the tokens of each ring position after the all-to-all, and the tokens of every rank before it."""
        ring = SequenceOrder.zigzag(length, self.ring_ranks, documents)
        return ring, ring.divided(self.head_ranks)


@dataclass(eq=False)
class SharedSample:
    """Distribution of a sequence over the ranks, shared by all layers of a forward.

    Args:
        groups: the process groups.
        length (`int`): tokens of the full sequence.
        documents: tokens at which another packed document begins.
    """

    groups: ContextGroups
    length: int
    documents: tuple[int, ...] = ()
    _blocks: dict[tuple[SequenceMask, int], list[MaskBlock]] = field(default_factory=dict)
    # Keyed by id, with a reference to the full tensor, so that the id is not reused meanwhile.
    _own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _unsharded: dict[int, Tensor] = field(default_factory=dict)
    # Names of the model's keyword arguments, which attention functions receive but do not read.
    handed_on: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.ring, self.order = self.groups.order(self.length, self.documents)

    @property
    def neighbor_sizes(self) -> tuple[int, ...]:
        """Number of tokens on each rank of the head group."""
        first = self.groups.ring_rank * self.groups.head_ranks
        return self.order.sizes[first : first + self.groups.head_ranks]

    def own(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of a tensor with one entry per token in `dim`; returns other tensors as is."""
        if tensor.dim() <= dim or tensor.shape[dim] != self.length:
            return tensor
        if id(tensor) not in self._own:
            # Cached: all layers get the same position ids and embeddings, [..., length, ...] -> [..., local, ...].
            part = take_tokens(tensor, dim, self.order, self.groups.rank)
            self._own[id(tensor)], self._unsharded[id(part)] = (tensor, part), tensor
        return self._own[id(tensor)][1]

    def unsharded(self, part: Tensor) -> Tensor:
        """Returns the full tensor that `own` has sliced; other tensors are returned as is."""
        return self._unsharded.get(id(part), part)

    def blocks(self, mask: SequenceMask, other: int) -> list[MaskBlock]:
        """Returns the attention blocks of this rank's queries and the keys of ring rank `other`."""
        key = mask, other
        if key not in self._blocks:
            keys = ((0, self.length),) if self.groups.gathers else self.ring.parts[other]
            self._blocks[key] = list(mask.blocks(self.ring.parts[self.groups.ring_rank], keys))
        return self._blocks[key]


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries over the keys of a ring, `[batch, heads, local, width]` each."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        row: SharedSample,
        mask: SequenceMask,
        kernel: Kernel,
    ) -> Tensor:
        # fp32 accumulators: output [batch, heads, local, width] and logsumexp [batch, heads, local].
        precise = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=precise)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=precise)
        # Each step merges one ring rank's keys and values into the running softmax.
        for other, keys, values in _around(row, k, v):
            kernel.add_forward(out, lse, q, keys, values, row.blocks(mask, other))
        # A sink only enlarges the softmax denominator: rescale the output accordingly.
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.to(precise).view(1, -1, 1))
            out *= torch.exp(lse - with_sinks).unsqueeze(-1)
            lse = with_sinks
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        ctx.row, ctx.mask, ctx.kernel = row, mask, kernel
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        row, mask, kernel = ctx.row, ctx.mask, ctx.kernel
        gradient = gradient.contiguous()
        precise = lse.dtype
        dq = torch.zeros_like(q, dtype=precise)
        # dq stays local; dk and dv of each ring rank's keys travel round the ring to that rank.
        travelling = _Travelling(row, k, v, precise)
        for other, keys, values in _around(row, k, v):
            dk, dv = torch.zeros_like(keys, dtype=precise), torch.zeros_like(values, dtype=precise)
            kernel.add_backward((dq, dk, dv), gradient, q, keys, values, out, lse, row.blocks(mask, other))
            travelling.add(other, dk, dv)
        dk, dv = travelling.home()
        dsinks = None
        if sinks is not None:
            # In float64: the sum over all queries has terms of both signs.
            along = (gradient.double() * out.double()).sum(-1)
            weight = torch.exp(sinks.double().view(1, -1, 1) - lse.double())
            dsinks = -(weight * along).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _around(row: SharedSample, k: Tensor, v: Tensor) -> Any:
    """Yields every ring rank with its keys and values, while the next rank's are being received."""
    groups, rank = row.groups, row.groups.ring_rank
    ranks = 1 if groups.gathers else groups.ring_ranks
    # Keys and values travel as one flat tensor; the ranks may hold different numbers of tokens.
    flat: Tensor = torch.cat([k.reshape(-1), v.reshape(-1)]) if ranks > 1 else k
    for step in range(ranks):
        # At each step the tensor is sent to the next rank, so the keys come from ever earlier ranks.
        other = (rank - step) % groups.ring_ranks
        passing = None
        if step + 1 < ranks:
            following = _numel(row, (other - 1) % groups.ring_ranks, k) + _numel(
                row, (other - 1) % groups.ring_ranks, v
            )
            assert groups.ring is not None
            passing = Passing(flat, following, groups.ring)
        yield other, k, v
        if passing is not None:
            flat = passing.wait()
            k, v = _unpacked(row, (other - 1) % groups.ring_ranks, flat, k, v)


def _numel(row: SharedSample, rank: int, like: Tensor) -> int:
    return like.shape[0] * like.shape[1] * row.ring.sizes[rank] * like.shape[3]


def _unpacked(row: SharedSample, rank: int, flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks a rank's keys and values `[batch, heads, local, width]` from the received flat tensor."""
    held = row.ring.sizes[rank]
    first = _numel(row, rank, k)
    return (
        flat[:first].view(*k.shape[:2], held, k.shape[3]),
        flat[first:].view(*v.shape[:2], held, v.shape[3]),
    )


class _Travelling:
    """Gradients of keys and values, which follow them round the ring and end on the rank that owns the keys."""

    def __init__(self, row: SharedSample, k: Tensor, v: Tensor, dtype: torch.dtype):
        self.row, self.k, self.v, self.dtype = row, k, v, dtype
        self.own: tuple[Tensor, Tensor] | None = None
        self.passing: Passing | None = None
        self.ranks = 1 if row.groups.gathers else row.groups.ring_ranks

    def add(self, rank: int, dk: Tensor, dv: Tensor) -> None:
        """Adds this rank's contribution to the gradients of a ring rank's keys and values, and sends them on."""
        if self.ranks == 1:
            self.own = dk, dv
            return
        flat = torch.cat([dk.reshape(-1), dv.reshape(-1)])
        # Add the gradient that earlier ring ranks have accumulated for the same keys.
        if self.passing is not None:
            flat += self.passing.wait()
        following = (rank - 1) % self.ranks
        size = _numel(self.row, following, self.k) + _numel(self.row, following, self.v)
        assert self.row.groups.ring is not None
        self.passing = Passing(flat, size, self.row.groups.ring)
        # Referenced until it is sent.
        self._sent = flat

    def home(self) -> tuple[Tensor, Tensor]:
        """Returns the complete gradients of this rank's own keys and values."""
        if self.own is not None:
            return self.own
        assert self.passing is not None
        return _unpacked(self.row, self.row.groups.ring_rank, self.passing.wait(), self.k, self.v)


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, row: SharedSample, mask: SequenceMask, kernel: Kernel, sinks: Tensor | None = None
) -> Tensor:
    """Computes attention of this rank's tokens, `[batch, heads, local, width]`, over the full sequence.

    Args:
        q, k, v: keys and values may have fewer heads than queries, and values another width.
        row: distribution of the sequence over the ranks.
        mask: which keys a query sees.
        sinks (`Tensor`, *optional*): `[heads]`, scores that get softmax weight but have no value (gpt-oss).
    """
    groups, width = row.groups, v.shape[-1]
    # Kernels support a single width; zero-padded values yield zeros, which are dropped at the end.
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    if groups.heads is not None:
        ranks, tokens = groups.head_ranks, row.neighbor_sizes
        # Repeat key/value heads until the ranks divide them, as with fewer heads than ranks.
        copies = lcm(k.shape[1], ranks) // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        # All-to-all: [batch, heads, local, width] -> [batch, heads / ranks, tokens of the head group, width].
        q, k, v = (to_heads(tensor, tokens, groups.heads) for tensor in (q, k, v))
        if sinks is not None:
            sinks = sinks.chunk(ranks)[dist.get_rank(groups.heads)]
    if groups.gathers and groups.ring is not None:
        # [batch, heads, local, width] -> [batch, heads, length, width]; the backward reduce-scatters the gradients.
        k, v = (gather_tokens(tensor, 2, row.ring, groups.ring) for tensor in (k, v))
    out = _Attention.apply(q, k, v, sinks, row, mask, kernel)
    if groups.heads is not None:
        # Back to this rank's tokens of all heads: [batch, heads, local, width].
        out = to_tokens(out, row.neighbor_sizes, groups.heads)
    return out[..., :width]


def with_blind_queries(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, row: SharedSample, blind: Tensor, kernel: Kernel
) -> Tensor:
    """Replaces the output of queries that see no key (`blind`, `[batch or 1, local]`) by the one of eager attention.

    Eager attention adds the lowest finite value to every score of such a query: all keys of the sequence get equal
    weight, including padding and later ones, and gradients flow through the scores that rounding has lost. Shapes are
    `[batch, heads, local, width]`.
    """
    assert row.groups.all is not None
    # Gather the full keys and values: only blind queries are computed, over all keys.
    k, v = (gather_tokens(tensor, 2, row.order, row.groups.all) for tensor in (k, v))
    blind = blind.to(q.device)
    places = blind.any(0).nonzero().flatten()
    scores = kernel.scores(q[:, :, places], k)
    weights = (scores + torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32).to(q.dtype)
    spread = out.index_copy(2, places, weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return torch.where(blind.view(len(blind), 1, -1, 1), spread, out)
