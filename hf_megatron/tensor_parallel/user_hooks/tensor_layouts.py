"""Layouts of activations (replicated, sequence-sharded, head-sharded, partial), and how to gather and split each.

| form | forward of open and close | backward of open and close |
|---|---|---|
| `Form` | identity: replicated | identity |
| `Tokens` | all-gather along the sequence, keep the local shard | keep the local shard, all-gather |
| `Columns` | the same along the last dim, for each of its blocks | the same |
| `Heads` | the same along the dim of heads | the same |
| `Addends` | identity: replicated, with a partial gradient on each rank | keep it on the first rank only, all-reduce |
| `InsideMLP` | `Columns` until the block's row-parallel linear has reduced its output | the same |

All ranks compute the same between opening and closing, from the tensors and gradients of a single process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...compat.shared import Shared
from ...core.communication.collectives import bounds, copy_to_ranks, gather_from_ranks, split_over_ranks
from ...errors import UnsupportedError
from ..hidden_states import HIDDEN_STATES
from ..region import SequenceStack, UniformRegion
from ..vocab_parallel_head import ShardedLogits

HEADS_DIM = 1


class _OfFirstRank(torch.autograd.Function):
    """Identity whose gradient, identical on all ranks, is counted once in a sum over them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.is_first = dist.get_rank(group) == 0
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Zero on all other ranks: the all-reduce that follows would multiply the gradient by the number of ranks.
        return gradient if ctx.is_first else torch.zeros_like(gradient), None


class Form(Shared):
    """Replicated tensor with its complete gradient."""

    is_split = False

    def open(self, tensor: Any) -> Any:
        """Returns the full tensor, given this rank's shard, of any shape."""
        return tensor

    def close(self, unsharded: Any) -> Any:
        """Returns this rank's shard of a full tensor."""
        return unsharded


class Logits(Form):
    """Output of a vocabulary head: logits that may not be computed yet."""

    def open(self, tensor: Any) -> Any:
        return tensor.gather(warn=False) if isinstance(tensor, ShardedLogits) else tensor


@dataclass
class Tokens(Form):
    """Sequence shard `[batch, local, ...]` or `[batch * local, ...]` of `[batch, sequence, ...]`."""

    stack: SequenceStack
    is_split = True

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor `[batch, tokens, ...]` has only the tokens of this rank."""
        group = self.stack.group
        start, stop = bounds(self.stack.length, dist.get_world_size(group), dist.get_rank(group))
        return tensor.shape[self.stack.get_token_dim(tensor)] == stop - start != self.stack.length

    def open(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            # Flattened tokens: [batch * local, width] -> [batch * sequence, width].
            return self.open(tensor.view(self.stack.batch, -1, tensor.shape[1])).flatten(0, 1)
        # [batch, local, ...] -> [batch, sequence, ...]
        return gather_from_ranks(tensor, self.stack.get_token_dim(tensor), self.stack.length, self.stack.group)

    def close(self, unsharded: Tensor) -> Tensor:
        if unsharded.dim() == 2:
            return self.close(unsharded.unflatten(0, (self.stack.batch, self.stack.length))).flatten(0, 1)
        dim = self.stack.get_token_dim(unsharded)
        if unsharded.shape[dim] != self.stack.length:
            raise UnsupportedError(
                f"A forward hook returned {unsharded.shape[dim]} tokens, expected {self.stack.length}: with "
                "sequence_parallel=True they are sharded between layers. Set sequence_parallel=False."
            )
        # [batch, sequence, ...] -> [batch, local, ...]
        return split_over_ranks(unsharded, dim, self.stack.group)


@dataclass
class Columns(Form):
    """Shard `[..., local]` of `[..., size]`, in each of `groups` blocks of the last dim."""

    size: int
    group: dist.ProcessGroup
    groups: int = 1
    is_split = True

    def open(self, tensor: Tensor) -> Tensor:
        # [..., groups * local] -> [..., groups, local] -> [..., groups, size / groups] -> [..., size]
        parts = tensor.unflatten(-1, (self.groups, tensor.shape[-1] // self.groups))
        return gather_from_ranks(parts, -1, self.size // self.groups, self.group).flatten(-2)

    def close(self, unsharded: Tensor) -> Tensor:
        blocks = unsharded.unflatten(-1, (self.groups, unsharded.shape[-1] // self.groups))
        return split_over_ranks(blocks, -1, self.group).flatten(-2)


@dataclass
class Heads(Form):
    """Head shard `[batch, heads / tp, ...]` of `[batch, heads, ...]`."""

    group: dist.ProcessGroup
    is_split = True

    def open(self, tensor: Tensor) -> Tensor:
        # [batch, heads / tp, ...] -> [batch, heads, ...]
        return gather_from_ranks(tensor, HEADS_DIM, tensor.shape[HEADS_DIM] * self.group.size(), self.group)

    def close(self, unsharded: Tensor) -> Tensor:
        # [batch, heads, ...] -> [batch, heads / tp, ...]
        return split_over_ranks(unsharded, HEADS_DIM, self.group)


@dataclass
class Addends(Form):
    """Replicated tensor inside a sharded block: each rank has a partial gradient of it."""

    group: dist.ProcessGroup

    def open(self, tensor: Tensor) -> Tensor:
        # The tensor is replicated already; only its gradient needs care.
        return _OfFirstRank.apply(tensor, self.group)

    def close(self, unsharded: Tensor) -> Tensor:
        return copy_to_ranks(unsharded, self.group)


@dataclass
class InsideMLP(Form):
    """Tensor inside an MLP: split features before the row-parallel linear, the block's output layout after it."""

    region: UniformRegion
    features: Columns
    trailing: Form
    is_split = True

    def _form(self, held: int, has: str) -> Form:
        if not self.region.is_inside:
            return self.trailing
        start, stop = bounds(self.features.size, self.features.group.size(), dist.get_rank(self.features.group))
        if held != (stop - start if has == "part" else self.features.size):
            raise UnsupportedError(
                f"A forward hook inside an MLP received or returned {held} features, whose sharding is unknown."
            )
        return self.features

    def open(self, tensor: Tensor) -> Tensor:
        return self._form(tensor.shape[-1], "part").open(tensor)

    def close(self, unsharded: Tensor) -> Tensor:
        return self._form(unsharded.shape[-1], "whole").close(unsharded)


WHOLE = Form()


def change_input(args: tuple, kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[tuple, dict[str, Any]]:
    """Applies `change` to the hidden states of a call: the first positional argument, or `hidden_states=`."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get(HIDDEN_STATES), Tensor):
        return args, {**kwargs, HIDDEN_STATES: change(kwargs[HIDDEN_STATES])}
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise UnsupportedError("A module with a forward hook was called without hidden states as its first argument.")
    return args, kwargs


def change_output(output: Any, first: Callable[[Any], Any], maps: Callable[[Any], Any] | None) -> Any:
    """Applies `first` to a module's output or its first entry, and `maps` to later entries with four dims."""
    if not isinstance(output, tuple):
        return first(output)
    rest = [maps(v) if maps is not None and isinstance(v, Tensor) and v.dim() == 4 else v for v in output[1:]]
    return (first(output[0]), *rest)
