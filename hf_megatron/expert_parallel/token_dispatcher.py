"""Token dispatcher: sends one row to each rank that holds any of a token's experts, however many these are.

    hidden [tokens, width], experts and weights [tokens, choices]
      -> dispatch   rows of all ranks' tokens, with the choices that are this rank's experts
      -> experts    each choice computed, weighted and summed per row
      -> combine    the rows of this rank's tokens, summed over ranks

The interface follows DeepEP's `dispatch` and `combine` (`Dispatcher`), so that other implementations can replace it. No
token is dropped: buffers have the size of what arrives. Ids that are no expert (negative, or of no rank) get no row.
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
    """Assignment of a layer's experts to ranks: an equal share of each of several equal blocks.

    Attributes:
        experts: number on all ranks.
        ranks: number of ranks that hold them.
        blocks: more than one if weights have entries for identity experts, since placements split equal blocks only.
    """

    experts: int
    ranks: int
    blocks: int = 1

    def by_rank(self, chosen: Tensor) -> Tensor:
        """Renumbers choices of any shape so that a rank's experts are consecutive; ids that are no expert stay."""
        if self.blocks == 1:
            return chosen
        # Expert i of rank r in block b: b * block + r * width + i -> r * blocks * width + b * width + i.
        block, width = self.experts // self.blocks, self.experts // self.blocks // self.ranks
        rank, place = chosen % block // width, chosen // block * width + chosen % width
        exists = (chosen >= 0) & (chosen < self.experts)
        return (rank * self.blocks * width + place).where(exists, chosen)

    def of_rank(self, rank: int) -> Tensor:
        """Returns the ids `[local experts]` of a rank's experts."""
        return torch.arange(self.experts).view(self.blocks, self.ranks, -1)[:, rank].flatten()


@dataclass(frozen=True)
class Route:
    """Source and destination of the rows of one forward.

    Attributes:
        tokens: `[rows sent]`, the token of each row, ordered by destination rank.
        ranks: `[rows sent]`, the destination of each row.
        count: number of this rank's tokens.
        sent, received: number of rows to and from each rank.
        pairs: number of choices in received rows that are this rank's experts.
    """

    tokens: Tensor
    ranks: Tensor
    count: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    pairs: int


class Dispatched(NamedTuple):
    """Input of a rank's experts.

    Attributes:
        rows: `[rows received, width]`.
        experts: `[rows received, choices]`, local ids; the number of local experts for choices of other ranks' experts.
        weights (*optional*): `[rows received, choices]`.
    """

    rows: Tensor
    experts: Tensor
    weights: Tensor | None


class Dispatcher(Protocol):
    """Interface that sends rows between the ranks that hold the experts of a layer.

    Attributes:
        experts: number of experts per rank.
        ranks: number of ranks that hold the experts.
        rank: this rank's index among them.
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
        """Sends `[tokens, width]` with choices and weights `[tokens, choices]` to the ranks of the chosen experts.

        A `route` of the same choices saves the exchange of sizes; `meanwhile` is called while rows are in flight.
        """

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        """Returns `[tokens, width]`: the rows `[rows received, width]` sent back and summed per token."""


class AllToAll(Shared):
    """Dispatcher based on `torch.distributed.all_to_all_single`; the host synchronizes once, for the sizes.

    Args:
        experts (`int`): number of experts per rank.
        group: the ranks that hold the experts, in order.
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
        # [rows sent, choices]: ids relative to the destination rank; choices of other ranks' experts become `experts`.
        local = chosen.index_select(0, route.tokens) - (route.ranks * self.experts).unsqueeze(-1)
        is_theirs = (local >= 0) & (local < self.experts)
        local = local.masked_fill(~is_theirs, self.experts)
        if weights is None:
            arrived, shares = send_rows(local.to(torch.int32), route.sent, route.received, self.group), None
        else:
            # One exchange for choices and weights, [rows, 2 * choices]: expert ids are exact in fp32.
            weights = weights.index_select(0, route.tokens).masked_fill(~is_theirs, 0)
            kind = torch.promote_types(weights.dtype, torch.float32)
            payload = torch.cat([local.to(kind), weights.to(kind)], 1)
            arrived, shares = exchange_rows(payload, route.sent, route.received, self.group).chunk(2, 1)
            shares = shares.to(weights.dtype)
        # [rows sent, width] -> [rows received, width]
        rows = hidden.index_select(0, route.tokens)
        rows = exchange_rows(rows, route.sent, route.received, self.group, meanwhile)
        return Dispatched(rows, arrived.detach().to(torch.int64), shares), route

    def _route(self, chosen: Tensor) -> Route:
        # [tokens, choices]: the rank of each chosen expert.
        rank_of = chosen.div(self.experts, rounding_mode="floor")
        # Ids that are no expert go to an extra column, which is cut off.
        rank_of = rank_of.masked_fill((rank_of < 0) | (rank_of >= self.ranks), self.ranks)
        # [ranks, tokens]: a token goes to a rank at most once, however many of its experts are there.
        goes = torch.zeros(len(chosen), self.ranks + 1, dtype=torch.bool, device=chosen.device)
        goes = goes.scatter_(1, rank_of, True)[:, : self.ranks].T
        # [ranks]: choices that each rank has to compute.
        choices = torch.zeros(self.ranks + 1, dtype=torch.int64, device=chosen.device)
        choices.scatter_add_(0, rank_of.flatten(), choices.new_ones(()).expand(rank_of.numel()))
        table = self.exchange_sizes(torch.stack([goes.sum(1), choices[: self.ranks]], 1), chosen)
        sent, received = tuple(row[0] for row in table), tuple(row[2] for row in table)
        # Static size: `sum(sent)` is on the host already. Rows are sorted by rank, then by token.
        ranks, tokens = torch.nonzero_static(goes, size=sum(sent)).unbind(1)
        return Route(tokens, ranks, len(chosen), sent, received, sum(row[3] for row in table))

    def exchange_sizes(self, sizes: Tensor, chosen: Tensor) -> list[list[int]]:
        """Exchanges the number of rows and choices between all ranks, for choices `[tokens, choices]`.

        Args:
            sizes: `[ranks, 2]`, rows and choices that go to each rank.

        Returns:
            `list`: for each rank, rows and choices sent to it, rows and choices received from it.
        """
        # [ranks, 2] -> [ranks, 2]: row i goes to rank i, and row i of the result comes from rank i.
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=self.group)
        # The only synchronization with the device in a layer.
        return torch.cat([sizes, arriving], 1).tolist()

    def combine(self, rows: Tensor, route: Route) -> Tensor:
        # [rows received, width] -> [rows sent, width], then summed to [tokens, width].
        back = exchange_rows(rows, route.received, route.sent, self.group)
        return add_rows(back, route.tokens, route.count)


def add_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Sums rows `[rows, width]` into `[count, width]` at indices `places` `[rows]`, in at least fp32."""
    # A token's rows from several ranks are summed.
    total = rows.new_zeros((count, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    return total.index_add(0, places, rows.to(total.dtype)).to(rows.dtype)
