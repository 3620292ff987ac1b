"""Batches of attention blocks for one call of a varlen flash kernel, across documents.

    blocks of one rank      [q 0:4, k 0:4]  [q 4:9, k 4:9]  [q 9:12, k 2:9]
    one call                concatenated queries, concatenated keys, and the cumulative lengths of the blocks

Each block is computed separately within the call, so the results are merged block by block, as from several calls.
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
    """Blocks without a mask, either all causal or none.

    Args:
        blocks: of one rank's queries and the current keys.
        batch (`int`): batch size.
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
        """Concatenates intervals of `[batch, heads, tokens, ...]` to `[batch * taken, heads, ...]`."""
        taken = torch.cat([slice_tokens(tensor, interval) for interval in intervals], 2)
        # [batch, heads, taken, ...] -> [batch, taken, heads, ...] -> [batch * taken, heads, ...]
        return taken.transpose(1, 2).flatten(0, 1)

    def edges(self, intervals: Sequence[Interval]) -> list[int]:
        """Returns the cumulative lengths of the blocks of all samples, from 0 to the number of joined tokens."""
        return [0, *accumulate([stop - start for start, stop in intervals] * self.batch)]

    def apart(self, tensor: Tensor, intervals: Sequence[Interval]) -> tuple[Tensor, ...]:
        """Splits `[batch * taken, heads, ...]` into each block's `[batch, heads, tokens, ...]`."""
        rows = tensor.unflatten(0, (self.batch, -1)).transpose(1, 2)
        return rows.split([stop - start for start, stop in intervals], 2)


def slice_tokens(tensor: Tensor, interval: Interval) -> Tensor:
    """Returns the tokens `[start, stop)` of `[batch, heads, tokens, ...]`."""
    start, stop = interval
    return tensor.narrow(2, start, stop - start)


def grouped(blocks: Sequence[MaskBlock], batch: int) -> tuple[list[JoinedBlocks], list[MaskBlock]]:
    """Batches the blocks that one call can compute; returns the batches, and the blocks that have a mask."""
    groups = []
    for causal in (True, False):
        # A kernel call has a single causal flag.
        unmasked = tuple(block for block in blocks if block.mask is None and block.causal is causal)
        if unmasked:
            groups.append(JoinedBlocks(unmasked, batch))
    return groups, [block for block in blocks if block.mask is not None]
