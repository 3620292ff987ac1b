"""Blocks on whole rows of which each rank computes some heads (Megatron's Mamba context parallel).

    x/cp --gather--> block with the weights of some heads, on the whole row --sum, own tokens--> x/cp

A rank has all weights and computes with its heads' part of them, so that a block's compute is shared out whatever its
tokens do among each other. Gradients of the other heads' weights are zeros, and those of all ranks add up. A norm over
all heads together divides by the mean of all ranks' squares, one number for each token; a narrow projection that reads
all heads is summed.
"""

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..axes import Axes
from ..communication.averaged_gradients import sum_over_ranks
from ..parallel_state import ParallelState
from ..parts import works_on_parts
from ..patterns import generic
from ..placement import Claim
from ..spec import HeadBlock, Width
from ..tensor_parallel.local_parameters import local_view
from .exchange import scatter_tokens
from .stack import ContextStack
from .whole_blocks import WholeBlock

_TOKENS = 1
_ABSENT = object()


def heads_to_share(block: nn.Module, name: str, state: ParallelState) -> HeadBlock | None:
    """Returns how a block's heads are shared out over the ranks of a row; `None` where they are not."""
    known = state.spec.head_blocks.get(generic(name))
    if known is None or any(attrgetter(count)(block) % state.axes.size("cp") for count in known.counts):
        return None
    # Weights of which tp ranks have parts, or parts of the gradient, are cut with no regard to heads.
    parts = {generic(weight) for weight, claim in state.claims.items() if _has_parts(claim, state.axes)}
    return None if any(generic(f"{name}.{own}") in parts for own, _ in block.named_parameters()) else known


def _has_parts(claim: Claim, axes: Axes) -> bool:
    return claim.placement.on(axes).is_split or claim.gradient.sum is not None


class SharedHeadBlock(WholeBlock):
    """The hooks around one block, and the heads of this rank while it computes.

    Args:
        name (`str`): of the block.
        heads (`HeadBlock`): how its weights are cut.
    """

    def __init__(self, stack: ContextStack, name: str, heads: HeadBlock):
        super().__init__(stack, name)
        self.heads = heads
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    @works_on_parts
    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        entered = super()._enter(block, args, kwargs)
        if entered is not None:
            self._take_heads(block)
        return entered

    @works_on_parts
    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        self._give_back()
        return super()._leave(block, args, output)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        row = self.stack.row
        assert row is not None
        return scatter_tokens(hidden, _TOKENS, row.order, self.stack.group)

    def _take_heads(self, block: nn.Module) -> None:
        ranks, rank = self.stack.ranks, self.stack.groups.rank
        # Widths are those of all heads.
        parts = {name: [_width(block, width) for width in widths] for name, (_, widths) in self.heads.weights.items()}
        for count in self.heads.counts:
            owner, own = _owner(block, count)
            self._replace(vars(owner), own, getattr(owner, own) // ranks)
        for name, (dim, _) in self.heads.weights.items():
            for held, own, weight in _held(block, name):
                sizes = parts[name] or [weight.shape[dim]]
                cut = [part.chunk(ranks, dim)[rank] for part in weight.split(sizes, dim)]
                self._replace(held, own, cut[0] if len(cut) == 1 else torch.cat(cut, dim))
        for name in self.heads.summed:
            for held, own, weight in _held(block, name):
                self._replace(held, own, weight / ranks)
        for name in self.heads.norms:
            norm = block.get_submodule(name)
            self._replace(vars(norm), "forward", norm_of_all_ranks(norm, self.stack.group))
        for name in self.heads.joined:
            linear = block.get_submodule(name)
            self._replace(vars(linear), "forward", product_of_all_ranks(linear.forward, self.stack.group))

    def _replace(self, held: dict[str, Any], own: str, value: Any) -> None:
        """Puts a value in the place of one that a module holds, and notes what to give back."""
        self._replaced.append((held, own, held.get(own, _ABSENT)))
        held[own] = value

    def _give_back(self) -> None:
        for held, own, value in reversed(self._replaced):
            if value is _ABSENT:
                del held[own]
            else:
                held[own] = value
        self._replaced = []


def norm_of_all_ranks(norm: Any, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of an RMS norm over the features of all ranks, each of which has as many."""

    def forward(hidden: Tensor) -> Tensor:
        numbers = hidden.float()
        squares = sum_over_ranks(numbers.pow(2).mean(-1, keepdim=True), group) / dist.get_world_size(group)
        return norm.weight * (numbers * torch.rsqrt(squares + norm.variance_epsilon)).to(hidden.dtype)

    return forward


def product_of_all_ranks(product: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a linear whose input features lie on several ranks, and whose output on each."""
    return lambda features: sum_over_ranks(product(features), group)


def _owner(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return block.get_submodule(path), own


def _held(block: nn.Module, name: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields what holds a parameter or buffer of a block with it, if the block has it."""
    owner, own = _owner(block, name)
    for held in (owner._parameters, owner._buffers):
        if (weight := local_view(held.get(own))) is not None:
            yield held, own, weight


def _width(block: nn.Module, width: Width) -> int:
    return math.prod(attrgetter(count)(block) for count in width)
