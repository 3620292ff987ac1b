"""Sums and means over ranks between which gradients are averaged afterwards: their backward undoes that.

What ranks make of one sum counts together, also where each multiplies it by a factor of its own, as loops do that know
losses of a rank's rows only: gradients are added up over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Mean(torch.autograd.Function):
    """`[sum, terms]` of each rank -> the mean over all ranks' terms, the same number on every rank."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, terms: Tensor, group: dist.ProcessGroup, at_least: int) -> Tensor:
        # Half precision counts to 256 or 2048 only.
        both = torch.stack([total, terms.to(total.device, total.dtype)])
        dist.all_reduce(both, group=group)
        # The mean of nothing is no number, and its gradients are zero, as torch's losses have it.
        ctx.terms, ctx.group = both[1].clamp(min=1), group
        return both[0] / both[1].clamp(min=at_least)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _added_up(gradient, ctx.group) / ctx.terms, None, None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks of a tensor of any shape, in whose backward the average of gradients is undone."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        unsharded = part.clone()
        dist.all_reduce(unsharded, group=group)
        return unsharded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _added_up(gradient, ctx.group), None


class _Scaled(torch.autograd.Function):
    """Identity of a tensor of any shape whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Returns a tensor of any shape whose gradient is multiplied by a factor."""
    return tensor if factor == 1 else _Scaled.apply(tensor, factor)


def _added_up(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def average_over_ranks(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Averages what ranks multiply a loss of all of them by, a scalar."""
    return _added_up(gradient, group) / dist.get_world_size(group)


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a tensor of any shape over ranks between which gradients are averaged: in its backward that is undone."""
    return _Sum.apply(part, group)


def mean_over_ranks(total: Tensor, terms: Tensor, group: dist.ProcessGroup, at_least: int) -> Tensor:
    """Takes the mean over all ranks' terms, scalars all; fewer than `at_least` count as these."""
    return _Mean.apply(total, terms, group, at_least)
