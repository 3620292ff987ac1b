"""Rows that change ranks in unequal numbers, as autograd nodes: one posts them, another one waits for them.

What is computed between the two overlaps with the exchange, and its backward with the exchange of the gradients:
autograd runs it after the node that posts these and before the one that waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Exchange:
    """One exchange each way: `sent` rows go to each rank of a group, and `received` come from each."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup):
        self.sent, self.received, self.group = list(sent), list(received), group
        self._active: tuple[Any, Tensor, Tensor] | None = None

    def post(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Begins to send `[sum of sent, ...]`; returns `[sum of received, ...]`, which is filled at `wait`."""
        rows = rows.contiguous()
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
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
        # Posted by the node behind; what that one handed on was in its place only.
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.post(gradient, ctx.exchange.received, ctx.exchange.sent)
        return gradient, None


def exchange_rows(
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Exchanges rows of any width; their gradients go back the same way.

    Args:
        rows: `[sum of sent, ...]`, those for the first rank first.
        sent, received: rows for and from each rank of the group.
        meanwhile (`Callable`, *optional*): called while they travel.
    """
    exchange = _Exchange(sent, received, group)
    arriving = _Post.apply(rows, exchange)
    if meanwhile is not None:
        meanwhile()
    return _Arrive.apply(arriving, exchange)


def send_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends `[sum of sent, ...]`, in the order of the ranks, and returns `[sum of received, ...]`; no gradient."""
    exchange = _Exchange(sent, received, group)
    exchange.post(rows, exchange.sent, exchange.received)
    return exchange.wait()
