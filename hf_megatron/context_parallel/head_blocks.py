"""Blocks on whole rows of which each rank computes some heads (Megatron's Mamba context parallel).

    x/cp --gather--> block with the weights of some heads, on the whole row --sum, own tokens--> x/cp

A rank has all weights and computes with its heads' part of them, so that a block's compute is shared out whatever its
tokens do among each other. Gradients of the other heads' weights are zeros, and those of all ranks add up.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..parts import works_on_parts
from ..patterns import generic
from ..spec import HeadBlock, ModelSpec, Width
from .exchange import scatter_tokens
from .stack import ContextStack
from .whole_blocks import WholeBlock

_TOKENS = 1


def heads_to_share(block: nn.Module, name: str, spec: ModelSpec, ranks: int) -> HeadBlock | None:
    """Returns how a block's heads are shared out over so many ranks; `None` where they are not."""
    known = spec.head_blocks.get(generic(name))
    if known is None or any(getattr(block, count) % ranks for count in known.counts):
        return None
    return known


class SharedHeadBlock(WholeBlock):
    """The hooks around one block, and the heads of this rank while it computes.

    Args:
        name (`str`): of the block.
        heads (`HeadBlock`): how its weights are cut.
    """

    def __init__(self, stack: ContextStack, name: str, heads: HeadBlock):
        super().__init__(stack, name)
        self.heads = heads
        self._counts: dict[str, int] = {}
        self._weights: list[tuple[nn.Module, str, Any]] = []

    @works_on_parts
    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        entered = super()._enter(block, args, kwargs)
        if entered is not None:
            self._take_heads(block)
        return entered

    @works_on_parts
    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        self._give_back(block)
        return super()._leave(block, args, output)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        row = self.stack.row
        assert row is not None
        return scatter_tokens(hidden, _TOKENS, row.order, self.stack.group)

    def _take_heads(self, block: nn.Module) -> None:
        ranks, rank = self.stack.ranks, self.stack.groups.rank
        # Widths are those of all heads.
        parts = {name: [_width(block, width) for width in widths] for name, (_, widths) in self.heads.weights.items()}
        self._counts = {count: getattr(block, count) for count in self.heads.counts}
        for count, number in self._counts.items():
            setattr(block, count, number // ranks)
        for name, (dim, _) in self.heads.weights.items():
            for owner, own, weight in self._weight(block, name):
                sizes = parts[name] or [weight.shape[dim]]
                cut = [part.chunk(ranks, dim)[rank] for part in weight.split(sizes, dim)]
                owner._parameters[own] = cut[0] if len(cut) == 1 else torch.cat(cut, dim)  # type: ignore[assignment]
        for name in self.heads.summed:
            for owner, own, weight in self._weight(block, name):
                owner._parameters[own] = weight / ranks  # type: ignore[assignment]

    def _weight(self, block: nn.Module, name: str) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yields a parameter of a block with its owner, if it has it, and notes what to give back."""
        path, _, own = name.rpartition(".")
        owner = block.get_submodule(path)
        weight = owner._parameters.get(own)
        if weight is not None:
            self._weights.append((owner, own, weight))
            yield owner, own, weight

    def _give_back(self, block: nn.Module) -> None:
        for count, number in self._counts.items():
            setattr(block, count, number)
        for owner, own, weight in self._weights:
            owner._parameters[own] = weight
        self._counts, self._weights = {}, []


def _width(block: nn.Module, width: Width) -> int:
    return math.prod(getattr(block, count) for count in width)
