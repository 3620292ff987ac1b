"""Rows that change ranks in unequal numbers, as an autograd node."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def send_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends `[sum of sent, ...]`, in the order of the ranks, and returns `[sum of received, ...]`; no gradient."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return send_rows(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return send_rows(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchanges rows of any width; their gradients go back the same way.

    Args:
        rows: `[sum of sent, ...]`, those for the first rank first.
        sent, received: rows for and from each rank of the group.
    """
    return _Exchange.apply(rows, sent, received, group)
