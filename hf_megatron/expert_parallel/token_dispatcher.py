"""A token's way to its experts and back: one row to each rank that holds any of them, however many these are.

    hidden [tokens, width], experts and weights [tokens, choices]
      -> dispatch   rows of all ranks' tokens, with the choices that are this rank's experts
      -> experts    each choice computed, weighed and added up to its row
      -> combine    the rows of this rank's tokens, those of all ranks added up

The contract is that of DeepEP's `dispatch` and `combine` (`Dispatcher`); other ways to move rows fit behind it. Nothing
is dropped: buffers have the size of what arrives. Experts that do not exist (ids below zero, or of no rank) get no row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.shared import Shared
from .all_to_all import exchange_rows, send_rows


@dataclass(frozen=True)
class ExpertBlocks:
    """Which of a layer's experts each rank holds: an equal share of each of some equal blocks of them.

    Attributes:
        experts: of all ranks together.
        ranks: that hold them.
        blocks: more than one where weights have entries for experts without any, as placements know equal blocks only.
    """

    experts: int
    ranks: int
    blocks: int = 1

    def by_rank(self, chosen: Tensor) -> Tensor:
        """Numbers choices of any shape so that a rank's experts follow each other; what is no expert is left."""
        if self.blocks == 1:
            return chosen
        block, width = self.experts // self.blocks, self.experts // self.blocks // self.ranks
        rank, place = chosen % block // width, chosen // block * width + chosen % width
        exists = (chosen >= 0) & (chosen < self.experts)
        return (rank * self.blocks * width + place).where(exists, chosen)

    def of_rank(self, rank: int) -> Tensor:
        """Returns the experts `[experts of each rank]` of a rank."""
        return torch.arange(self.experts).view(self.blocks, self.ranks, -1)[:, rank].flatten()


@dataclass(frozen=True)
class Route:
    """Where the rows of one forward went.

    Attributes:
        tokens: `[rows sent]`, the token of each, those for the first rank first.
        ranks: `[rows sent]`, where each goes.
        count: tokens of this rank.
        sent, received: rows for and from each rank.
        pairs: choices of received rows that are this rank's experts.
    """

    tokens: Tensor
    ranks: Tensor
    count: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    pairs: int


class Dispatched(NamedTuple):
    """What a rank's experts are to compute.

    Attributes:
        rows: `[rows received, width]`.
        experts: `[rows received, choices]`, counted among this rank's; of other ranks' choices their number.
        weights (*optional*): `[rows received, choices]`.
    """

    rows: Tensor
    experts: Tensor
    weights: Tensor | None


class Dispatcher(Protocol):
    """Moves rows between the ranks that hold the experts of a layer.

    Attributes:
        experts: of each rank.
        ranks: that hold all experts together.
        rank: which of them this is.
    """

    experts: int
    ranks: int
    rank: int

    def dispatch(
        self,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor | None,
        route: Route | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Dispatched, Route]:
        """Sends `[tokens, width]` with choices and weights `[tokens, choices]` to the ranks of the experts chosen.

        A `route` of the same choices spares the exchange of sizes; `meanwhile` is called while rows travel.
        """

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Returns `[tokens, width]`: the rows `[rows received, width]` back at their tokens, added up."""


class AllToAll(Shared):
    """Rows exchanged by `torch.distributed.all_to_all_single`; the host waits once, for the sizes.

    Args:
        experts (`int`): of each rank.
        group: the ranks that hold all experts together, in their order.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup):
        self.experts, self.group = experts, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def dispatch(
        self,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor | None,
        route: Route | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Dispatched, Route]:
        chosen = chosen.to(torch.int64)
        route = self._route(chosen) if route is None else route
        local = chosen.index_select(0, route.tokens) - (route.ranks * self.experts).unsqueeze(-1)
        is_theirs = (local >= 0) & (local < self.experts)
        local = local.masked_fill(~is_theirs, self.experts)
        if weights is None:
            arrived, shares = send_rows(local.to(torch.int32), route.sent, route.received, self.group), None
        else:
            # Choices and weights in one exchange: numbers of experts are exact in fp32.
            weights = weights.index_select(0, route.tokens).masked_fill(~is_theirs, 0)
            kind = torch.promote_types(weights.dtype, torch.float32)
            alongside = torch.cat([local.to(kind), weights.to(kind)], 1)
            arrived, shares = exchange_rows(alongside, route.sent, route.received, self.group).chunk(2, 1)
            shares = shares.to(weights.dtype)
        rows = hidden.index_select(0, route.tokens)
        rows = exchange_rows(rows, route.sent, route.received, self.group, meanwhile)
        return Dispatched(rows, arrived.detach().to(torch.int64), shares), route

    def _route(self, chosen: Tensor) -> Route:
        rank_of = chosen.div(self.experts, rounding_mode="floor")
        # What no rank has goes to a column that is cut off.
        rank_of = rank_of.masked_fill((rank_of < 0) | (rank_of >= self.ranks), self.ranks)
        goes = torch.zeros(len(chosen), self.ranks + 1, dtype=torch.bool, device=chosen.device)
        goes = goes.scatter_(1, rank_of, True)[:, : self.ranks].T
        choices = torch.zeros(self.ranks + 1, dtype=torch.int64, device=chosen.device)
        choices.scatter_add_(0, rank_of.flatten(), choices.new_ones(()).expand(rank_of.numel()))
        table = self.exchange_sizes(torch.stack([goes.sum(1), choices[: self.ranks]], 1), chosen)
        sent, received = tuple(row[0] for row in table), tuple(row[2] for row in table)
        ranks, tokens = torch.nonzero_static(goes, size=sum(sent)).unbind(1)
        return Route(tokens, ranks, len(chosen), sent, received, sum(row[3] for row in table))

    def exchange_sizes(self, sizes: Tensor, chosen: Tensor) -> list[list[int]]:
        """Returns what goes to each rank and comes from it, of choices `[tokens, choices]`.

        Args:
            sizes: `[ranks, 2]`, rows and choices that go to each.

        Returns:
            `list`: for each rank, rows and choices that go there, rows and choices that come from there.
        """
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=self.group)
        # The one wait for a device in a layer.
        return torch.cat([sizes, arriving], 1).tolist()

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        back = exchange_rows(rows, route.received, route.sent, self.group)
        return add_rows(back, route.tokens, route.count)


def add_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Adds rows `[rows, width]` up at their places `[rows]` in `[count, width]`, in fp32 at least."""
    total = rows.new_zeros((count, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    return total.index_add(0, places, rows.to(total.dtype)).to(rows.dtype)
