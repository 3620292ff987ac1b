"""All-to-all of rows (tokens) in unequal numbers, as two autograd nodes: one starts it, the other completes it.

Computation between the two overlaps with the exchange. Its backward overlaps with the exchange of the gradients, since
autograd runs it after the node that starts that exchange and before the node that completes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Exchange:
    """One exchange in each direction: `sent[i]` rows go to rank i of a group, `received[i]` rows come from it."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup):
        self.sent, self.received, self.group = list(sent), list(received), group
        self._active: tuple[Any, Tensor, Tensor] | None = None

    def post(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Starts sending `[sum of sent, ...]`; returns `[sum of received, ...]`, which is filled by `wait`."""
        rows = rows.contiguous()
        # Exact size: no capacity limit, no dropped rows.
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
        # The reference keeps the sent rows alive until the exchange is complete.
        self._active = work, rows, arriving
        return arriving

    def wait(self) -> Tensor:
        assert self._active is not None
        (work, _, arrived), self._active = self._active, None
        work.wait()
        return arrived


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.post(rows, exchange.sent, exchange.received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # `_Arrive.backward` started the exchange; the gradient it returned is only a placeholder.
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        # The buffer of `_Post` is filled now: [sum of received, ...].
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Gradients take the opposite way, [sum of received, ...] -> [sum of sent, ...]; `_Post.backward` receives them.
        ctx.exchange.post(gradient, ctx.exchange.received, ctx.exchange.sent)
        return gradient, None


def exchange_rows(
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """All-to-all of rows of any width; their gradients take the opposite way.

    Args:
        rows: `[sum of sent, ...]`, ordered by destination rank.
        sent, received: number of rows to and from each rank of the group.
        meanwhile (`Callable`, *optional*): called while the rows are in flight.
    """
    exchange = _Exchange(sent, received, group)
    # Two nodes, so that `meanwhile` runs during the exchange, in forward and backward.
    arriving = _Post.apply(rows, exchange)
    if meanwhile is not None:
        meanwhile()
    return _Arrive.apply(arriving, exchange)


def send_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of `[sum of sent, ...]`, ordered by rank, to `[sum of received, ...]`; not differentiable."""
    exchange = _Exchange(sent, received, group)
    exchange.post(rows, exchange.sent, exchange.received)
    return exchange.wait()
