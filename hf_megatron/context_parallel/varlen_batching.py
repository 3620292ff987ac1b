"""Blocks of queries and keys that one call of a flash kernel computes, however many documents they come from.

    blocks of one rank      [q 0:4, k 0:4]  [q 4:9, k 4:9]  [q 9:12, k 2:9]
    one call                queries end to end, keys end to end, and where each block's begin

Every block's queries are in it once, so that what it gives is put together block by block, as from several calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .load_balancing import Interval
from .masks import MaskBlock


@dataclass(frozen=True)
class JoinedBlocks:
    """Blocks without a mask that are all causal, or none is.

    Args:
        blocks: of one rank's queries and the keys at hand.
        batch (`int`): rows.
    """

    blocks: tuple[MaskBlock, ...]
    batch: int

    @property
    def causal(self) -> bool:
        return self.blocks[0].causal

    @cached_property
    def queries(self) -> tuple[Interval, ...]:
        return tuple(block.queries for block in self.blocks)

    @cached_property
    def keys(self) -> tuple[Interval, ...]:
        return tuple(block.keys for block in self.blocks)

    def joined(self, tensor: Tensor, intervals: Sequence[Interval]) -> Tensor:
        """Takes the tokens of intervals of `[batch, heads, tokens, ...]`; returns `[batch * taken, heads, ...]`."""
        taken = torch.cat([tokens_of(tensor, interval) for interval in intervals], 2)
        return taken.transpose(1, 2).flatten(0, 1)

    def edges(self, intervals: Sequence[Interval]) -> list[int]:
        """Returns where each block of each row begins among the joined tokens, and where the last one ends."""
        return [0, *accumulate([stop - start for start, stop in intervals] * self.batch)]

    def apart(self, tensor: Tensor, intervals: Sequence[Interval]) -> tuple[Tensor, ...]:
        """Returns each block's `[batch, heads, tokens, ...]` of `[batch * taken, heads, ...]`."""
        rows = tensor.unflatten(0, (self.batch, -1)).transpose(1, 2)
        return rows.split([stop - start for start, stop in intervals], 2)


def tokens_of(tensor: Tensor, interval: Interval) -> Tensor:
    """Returns the tokens `[start, stop)` of `[batch, heads, tokens, ...]`."""
    start, stop = interval
    return tensor.narrow(2, start, stop - start)


def grouped(blocks: Sequence[MaskBlock], batch: int) -> tuple[list[JoinedBlocks], list[MaskBlock]]:
    """Joins blocks as far as one call can compute them; returns those, and the blocks that have a mask."""
    groups = []
    for causal in (True, False):
        identical = tuple(block for block in blocks if block.mask is None and block.causal is causal)
        if identical:
            groups.append(JoinedBlocks(identical, batch))
    return groups, [block for block in blocks if block.mask is not None]
