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
        cp_group (`ProcessGroup`, *optional*): all ranks that split the sequence.
    """

    heads: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    gathers: bool = False
    cp_group: dist.ProcessGroup | None = None

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
class TokenLayout:
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

    def blocks(self, mask: SequenceMask, source_rank: int) -> list[MaskBlock]:
        """Returns the attention blocks of this rank's queries and the keys of ring rank `source_rank`."""
        key = mask, source_rank
        if key not in self._blocks:
            keys = ((0, self.length),) if self.groups.gathers else self.ring.parts[source_rank]
            self._blocks[key] = list(mask.blocks(self.ring.parts[self.groups.ring_rank], keys))
        return self._blocks[key]


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries over the keys of a ring; keys and values may have fewer heads (kv heads).

    | scheme | queries | keys and values |
    |---|---|---|
    | p2p | `[batch, heads, local, width]` | `[batch, kv heads, local, width]` |
    | a2a, a2a+p2p | `[batch, heads / ranks, tokens of the head group, width]` | the same with kv heads |
    | all_gather | `[batch, heads, local, width]` | `[batch, kv heads, length, width]` |
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: TokenLayout,
        mask: SequenceMask,
        kernel: Kernel,
    ) -> Tensor:
        # fp32 accumulators: output [batch, heads, local, width] and logsumexp [batch, heads, local].
        precise = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=precise)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=precise)
        # Each step merges one ring rank's keys and values into the running softmax.
        for source_rank, keys, values in _ring_steps(layout, k, v):
            kernel.add_forward(out, lse, q, keys, values, layout.blocks(mask, source_rank))
        # A sink only enlarges the softmax denominator: rescale the output accordingly.
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.to(precise).view(1, -1, 1))
            out *= torch.exp(lse - with_sinks).unsqueeze(-1)
            lse = with_sinks
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        ctx.layout, ctx.mask, ctx.kernel = layout, mask, kernel
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        layout, mask, kernel = ctx.layout, ctx.mask, ctx.kernel
        gradient = gradient.contiguous()
        precise = lse.dtype
        dq = torch.zeros_like(q, dtype=precise)
        # dq stays local; dk and dv of each ring rank's keys travel round the ring to that rank.
        ring_gradients = _RingGradients(layout, k, v, precise)
        for source_rank, keys, values in _ring_steps(layout, k, v):
            dk, dv = torch.zeros_like(keys, dtype=precise), torch.zeros_like(values, dtype=precise)
            kernel.add_backward((dq, dk, dv), gradient, q, keys, values, out, lse, layout.blocks(mask, source_rank))
            ring_gradients.add(source_rank, dk, dv)
        dk, dv = ring_gradients.result()
        dsinks = None
        if sinks is not None:
            # In float64: the sum over all queries has terms of both signs.
            along = (gradient.double() * out.double()).sum(-1)
            weight = torch.exp(sinks.double().view(1, -1, 1) - lse.double())
            dsinks = -(weight * along).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _ring_steps(layout: TokenLayout, k: Tensor, v: Tensor) -> Any:
    """Yields every ring rank with its keys and values, while the next rank's are being received."""
    groups, rank = layout.groups, layout.groups.ring_rank
    ranks = 1 if groups.gathers else groups.ring_ranks
    # Keys and values travel as one flat tensor; the ranks may hold different numbers of tokens.
    flat: Tensor = torch.cat([k.reshape(-1), v.reshape(-1)]) if ranks > 1 else k
    for step in range(ranks):
        # At each step the tensor is sent to the next rank, so the keys come from ever earlier ranks.
        source_rank = (rank - step) % groups.ring_ranks
        next_rank = (source_rank - 1) % groups.ring_ranks
        in_flight = None
        if step + 1 < ranks:
            next_size = _numel(layout, next_rank, k) + _numel(layout, next_rank, v)
            assert groups.ring is not None
            in_flight = Passing(flat, next_size, groups.ring)
        yield source_rank, k, v
        if in_flight is not None:
            flat = in_flight.wait()
            k, v = _unpacked(layout, next_rank, flat, k, v)


def _numel(layout: TokenLayout, rank: int, like: Tensor) -> int:
    return like.shape[0] * like.shape[1] * layout.ring.sizes[rank] * like.shape[3]


def _unpacked(layout: TokenLayout, rank: int, flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks a rank's keys and values `[batch, heads, local, width]` from the received flat tensor."""
    tokens = layout.ring.sizes[rank]
    first = _numel(layout, rank, k)
    return (
        flat[:first].view(*k.shape[:2], tokens, k.shape[3]),
        flat[first:].view(*v.shape[:2], tokens, v.shape[3]),
    )


class _RingGradients:
    """Gradients of keys and values, which follow them round the ring and end on the rank that owns the keys."""

    def __init__(self, layout: TokenLayout, k: Tensor, v: Tensor, dtype: torch.dtype):
        self.layout, self.k, self.v, self.dtype = layout, k, v, dtype
        self.own: tuple[Tensor, Tensor] | None = None
        self.in_flight: Passing | None = None
        self.ranks = 1 if layout.groups.gathers else layout.groups.ring_ranks

    def add(self, rank: int, dk: Tensor, dv: Tensor) -> None:
        """Adds this rank's contribution to the gradients of a ring rank's keys and values, and sends them on."""
        if self.ranks == 1:
            self.own = dk, dv
            return
        flat = torch.cat([dk.reshape(-1), dv.reshape(-1)])
        # Add the gradient that earlier ring ranks have accumulated for the same keys.
        if self.in_flight is not None:
            flat += self.in_flight.wait()
        next_rank = (rank - 1) % self.ranks
        size = _numel(self.layout, next_rank, self.k) + _numel(self.layout, next_rank, self.v)
        assert self.layout.groups.ring is not None
        self.in_flight = Passing(flat, size, self.layout.groups.ring)
        # Referenced until it is sent.
        self._sent = flat

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the complete gradients of this rank's own keys and values."""
        if self.own is not None:
            return self.own
        assert self.in_flight is not None
        return _unpacked(self.layout, self.layout.groups.ring_rank, self.in_flight.wait(), self.k, self.v)


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    mask: SequenceMask,
    kernel: Kernel,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention of this rank's tokens, `[batch, heads, local, width]`, over the full sequence.

    Args:
        q, k, v: keys and values may have fewer heads than queries, and values another width.
        layout (`TokenLayout`): distribution of the sequence over the ranks.
        mask: which keys a query sees.
        sinks (`Tensor`, *optional*): `[heads]`, scores that get softmax weight but have no value (gpt-oss).
    """
    groups, width = layout.groups, v.shape[-1]
    # Kernels support a single width; zero-padded values yield zeros, which are dropped at the end.
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    if groups.heads is not None:
        ranks, tokens = groups.head_ranks, layout.neighbor_sizes
        # Repeat kv heads until their number is a multiple of the ranks (e.g. 2 kv heads on 4 ranks: twice).
        copies = lcm(k.shape[1], ranks) // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        # All-to-all: [batch, heads, local, width] -> [batch, heads / ranks, tokens of the head group, width].
        q, k, v = (to_heads(tensor, tokens, groups.heads) for tensor in (q, k, v))
        if sinks is not None:
            sinks = sinks.chunk(ranks)[dist.get_rank(groups.heads)]
    if groups.gathers and groups.ring is not None:
        # [batch, heads, local, width] -> [batch, heads, length, width]; the backward reduce-scatters the gradients.
        k, v = (gather_tokens(tensor, 2, layout.ring, groups.ring) for tensor in (k, v))
    out = _Attention.apply(q, k, v, sinks, layout, mask, kernel)
    if groups.heads is not None:
        # Back to this rank's tokens of all heads: [batch, heads, local, width].
        out = to_tokens(out, layout.neighbor_sizes, groups.heads)
    return out[..., :width]


def with_fully_masked_queries(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, fully_masked: Tensor, kernel: Kernel
) -> Tensor:
    """Replaces the output of queries whose mask hides every key, `[batch or 1, local]`, by the one of eager attention.

    Eager attention adds the lowest finite value to every score of such a query, and rounding makes the scores equal:
    all keys of the sequence get the same weight, including padding and later ones. Gradients still flow to queries and
    keys. Tensors are `[batch, heads, local, width]`; keys and values may have fewer heads.
    """
    assert layout.groups.cp_group is not None
    # Gather the full keys and values: only fully masked queries are computed, over all keys.
    k, v = (gather_tokens(tensor, 2, layout.order, layout.groups.cp_group) for tensor in (k, v))
    fully_masked = fully_masked.to(q.device)
    query_indices = fully_masked.any(0).nonzero().flatten()
    scores = kernel.scores(q[:, :, query_indices], k)
    weights = (scores + torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32).to(q.dtype)
    uniform = out.index_copy(2, query_indices, weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return torch.where(fully_masked.view(len(fully_masked), 1, -1, 1), uniform, out)
