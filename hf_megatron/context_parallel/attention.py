"""Attention over tokens that lie on several ranks, by the names of Megatron's `cp_comm_type`.

    a2a           heads are exchanged for tokens and back: each rank sees all tokens of some heads (Ulysses)
    p2p           keys and values go round a ring; each rank puts together what its queries see (Ring Attention)
    a2a+p2p       heads among neighbours, then a ring of such groups
    all_gather    keys and values are gathered, and their gradients summed

One function computes all of them: after heads were exchanged, what is left is a ring of one rank or more. Keys are sent
before the block at hand is computed and waited for after it; their gradients travel one block behind them.
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
    """The ranks that share a row.

    Args:
        heads (`ProcessGroup`, *optional*): neighbours that exchange heads for tokens.
        ring (`ProcessGroup`, *optional*): ranks between which keys and values go.
        gathers (`bool`): keys and values are gathered over the ring at once.
        all (`ProcessGroup`, *optional*): all of them.
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
        """Place among all ranks that share a row; neighbours exchange heads."""
        return self.ring_rank * self.head_ranks + (0 if self.heads is None else dist.get_rank(self.heads))

    def order(self, length: int, documents: tuple[int, ...] = ()) -> tuple[SequenceOrder, SequenceOrder]:
        """Returns what the ranks of the ring hold of a row once heads are exchanged, and what every rank holds."""
        ring = SequenceOrder.zigzag(length, self.ring_ranks, documents)
        return ring, ring.divided(self.head_ranks)


@dataclass(eq=False)
class SharedSample:
    """One row's way over the ranks, the same for all layers of a forward.

    Args:
        groups: the ranks.
        length (`int`): tokens of the row.
        documents: tokens at which another document begins.
    """

    groups: ContextGroups
    length: int
    documents: tuple[int, ...] = ()
    _blocks: dict[tuple[SequenceMask, int], list[MaskBlock]] = field(default_factory=dict)
    # With the whole ones, whose number no other tensor gets meanwhile.
    _own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _unsharded: dict[int, Tensor] = field(default_factory=dict)
    # Names of what the model was called with, which attention functions are handed and none of them reads.
    handed_on: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.ring, self.order = self.groups.order(self.length, self.documents)

    @property
    def sizes_of_neighbours(self) -> tuple[int, ...]:
        """Tokens of the ranks that exchange heads."""
        first = self.groups.ring_rank * self.groups.head_ranks
        return self.order.sizes[first : first + self.groups.head_ranks]

    def own(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's entries of what has one for each token in a dim; others stay as they are."""
        if tensor.dim() <= dim or tensor.shape[dim] != self.length:
            return tensor
        if id(tensor) not in self._own:
            part = take_tokens(tensor, dim, self.order, self.groups.rank)
            self._own[id(tensor)], self._unsharded[id(part)] = (tensor, part), tensor
        return self._own[id(tensor)][1]

    def unsharded(self, part: Tensor) -> Tensor:
        """Returns what `own` has cut; other tensors stay as they are."""
        return self._unsharded.get(id(part), part)

    def blocks(self, mask: SequenceMask, other: int) -> list[MaskBlock]:
        """Returns the blocks of this rank's queries and the keys of another rank of the ring."""
        key = mask, other
        if key not in self._blocks:
            keys = ((0, self.length),) if self.groups.gathers else self.ring.parts[other]
            self._blocks[key] = list(mask.blocks(self.ring.parts[self.groups.ring_rank], keys))
        return self._blocks[key]


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries and the keys of a ring, `[batch, heads, held, width]` all."""

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
        precise = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=precise)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=precise)
        for other, keys, values in _around(row, k, v):
            kernel.add_forward(out, lse, q, keys, values, row.blocks(mask, other))
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
        travelling = _Travelling(row, k, v, precise)
        for other, keys, values in _around(row, k, v):
            dk, dv = torch.zeros_like(keys, dtype=precise), torch.zeros_like(values, dtype=precise)
            kernel.add_backward((dq, dk, dv), gradient, q, keys, values, out, lse, row.blocks(mask, other))
            travelling.add(other, dk, dv)
        dk, dv = travelling.home()
        dsinks = None
        if sinks is not None:
            # Terms of all queries and both signs.
            along = (gradient.double() * out.double()).sum(-1)
            weight = torch.exp(sinks.double().view(1, -1, 1) - lse.double())
            dsinks = -(weight * along).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _around(row: SharedSample, k: Tensor, v: Tensor) -> Any:
    """Yields every rank of the ring with its keys and values; those of the next are on their way meanwhile."""
    groups, rank = row.groups, row.groups.ring_rank
    ranks = 1 if groups.gathers else groups.ring_ranks
    flat: Tensor = torch.cat([k.reshape(-1), v.reshape(-1)]) if ranks > 1 else k
    for step in range(ranks):
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
    """Reads a rank's keys and values, shaped as others' but for their number of tokens, out of what came."""
    held = row.ring.sizes[rank]
    first = _numel(row, rank, k)
    return (
        flat[:first].view(*k.shape[:2], held, k.shape[3]),
        flat[first:].view(*v.shape[:2], held, v.shape[3]),
    )


class _Travelling:
    """The gradients of keys and values, which follow them round the ring and end where they came from."""

    def __init__(self, row: SharedSample, k: Tensor, v: Tensor, dtype: torch.dtype):
        self.row, self.k, self.v, self.dtype = row, k, v, dtype
        self.own: tuple[Tensor, Tensor] | None = None
        self.passing: Passing | None = None
        self.ranks = 1 if row.groups.gathers else row.groups.ring_ranks

    def add(self, rank: int, dk: Tensor, dv: Tensor) -> None:
        """Adds this rank's part to the gradients of a rank's keys and values, and sends them on."""
        if self.ranks == 1:
            self.own = dk, dv
            return
        flat = torch.cat([dk.reshape(-1), dv.reshape(-1)])
        if self.passing is not None:
            flat += self.passing.wait()
        following = (rank - 1) % self.ranks
        size = _numel(self.row, following, self.k) + _numel(self.row, following, self.v)
        assert self.row.groups.ring is not None
        self.passing = Passing(flat, size, self.row.groups.ring)
        # Kept until it has left.
        self._sent = flat

    def home(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this rank's own keys and values."""
        if self.own is not None:
            return self.own
        assert self.passing is not None
        return _unpacked(self.row, self.row.groups.ring_rank, self.passing.wait(), self.k, self.v)


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, row: SharedSample, mask: SequenceMask, kernel: Kernel, sinks: Tensor | None = None
) -> Tensor:
    """Computes attention of the tokens that this rank holds, `[batch, heads, held, width]`, over the whole row.

    Args:
        q, k, v: keys and values may have fewer heads than queries, and values another width.
        row: where the tokens lie.
        mask: which keys a query sees.
        sinks (`Tensor`, *optional*): `[heads]`, a score that takes weight and gives nothing (gpt-oss).
    """
    groups, width = row.groups, v.shape[-1]
    # A kernel has one width; zeros of values come out as zeros.
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    if groups.heads is not None:
        ranks, tokens = groups.head_ranks, row.sizes_of_neighbours
        copies = lcm(k.shape[1], ranks) // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        q, k, v = (to_heads(tensor, tokens, groups.heads) for tensor in (q, k, v))
        if sinks is not None:
            sinks = sinks.chunk(ranks)[dist.get_rank(groups.heads)]
    if groups.gathers and groups.ring is not None:
        k, v = (gather_tokens(tensor, 2, row.ring, groups.ring) for tensor in (k, v))
    out = _Attention.apply(q, k, v, sinks, row, mask, kernel)
    if groups.heads is not None:
        out = to_tokens(out, row.sizes_of_neighbours, groups.heads)
    return out[..., :width]


def with_blind_queries(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, row: SharedSample, blind: Tensor, kernel: Kernel
) -> Tensor:
    """Gives queries that see no key what eager attention makes of them, where `blind` `[batch or 1, held]` is true.

    Eager attention adds the least number there is to every score: all keys of the row count alike, also padding and
    what comes later, and gradients flow through the scores that the sum has lost. `[batch, heads, held, width]` all.
    """
    assert row.groups.all is not None
    k, v = (gather_tokens(tensor, 2, row.order, row.groups.all) for tensor in (k, v))
    blind = blind.to(q.device)
    places = blind.any(0).nonzero().flatten()
    scores = kernel.scores(q[:, :, places], k)
    weights = (scores + torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32).to(q.dtype)
    spread = out.index_copy(2, places, weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return torch.where(blind.view(len(blind), 1, -1, 1), spread, out)
