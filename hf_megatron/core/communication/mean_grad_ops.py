"""Differentiable sums and means over data-parallel ranks whose gradients are averaged afterwards.

Gradient averaging would divide the result's gradient by the number of ranks; the backward all-reduces the incoming
gradients (sum, not mean) to compensate. This also holds if each rank scales the result by its own factor, as loops do
that only know the losses of the local samples.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...compat.torch_autograd import run_function


class _Mean(torch.autograd.Function):
    """Mean over all ranks' terms from each rank's scalars `(sum, terms)`; identical on every rank."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, terms: Tensor, group: dist.ProcessGroup, at_least: int) -> Tensor:
        # One collective for both scalars. Counts in half precision are exact only up to 256 (bf16) or 2048 (fp16).
        both = torch.stack([total, terms.to(total.device, total.dtype)])
        dist.all_reduce(both, group=group)
        # A mean over zero terms is NaN unless `at_least` is set; its gradient is zero, as in torch's losses.
        ctx.terms, ctx.group = both[1].clamp(min=1), group
        return both[0] / both[1].clamp(min=at_least)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # Gradient averaging divides by the number of ranks later, so sum the factors here.
        return _added_up(gradient, ctx.group) / ctx.terms, None, None, None


class _Sum(torch.autograd.Function):
    """All-reduced tensor of any shape, whose backward compensates for the averaging of gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # The input may be needed by other operations, so reduce a copy.
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _added_up(gradient, ctx.group), None


class _Scaled(torch.autograd.Function):
    """Identity on a tensor of any shape that scales the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Returns a tensor of any shape whose gradient is scaled by `factor`."""
    return tensor if factor == 1 else run_function(_Scaled, tensor, factor)


def _added_up(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    # autograd may share `gradient` with other nodes: reduce a copy.
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def average_over_ranks(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Averages over the ranks the scalar factor by which each of them multiplied a global loss."""
    return _added_up(gradient, group) / dist.get_world_size(group)


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a tensor of any shape over ranks; its backward compensates for the averaging of gradients."""
    return _Sum.apply(part, group)


def mean_over_ranks(total: Tensor, terms: Tensor, group: dist.ProcessGroup, at_least: int) -> Tensor:
    """Returns the mean over all ranks' terms, from scalars; the divisor is at least `at_least`."""
    return _Mean.apply(total, terms, group, at_least)
