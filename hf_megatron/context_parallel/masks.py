"""Attention masks without a tensor of queries x keys: an interval of keys for each query, and the exceptions.

Causal, windowed, chunked, packed and padded masks are such intervals. If a query's keys have gaps, columns of the batch
are masked, or a function of positions is evaluated tile by tile. `blocks` splits the pairs of one rank's queries and
another's keys into blocks for the kernel: without a mask, with the causal flag, and with a tile of a mask.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from .load_balancing import Interval

# Queries per tile of a masked block: small enough that no mask of the full sequence is created.
TILE = 512


@dataclass(frozen=True)
class MaskBlock:
    """Queries and keys of one kernel call, as indices into their ranks' local tokens.

    Args:
        queries, keys: `[start, stop)`.
        causal (`bool`): a query sees the keys up to its own position in the block.
        mask (`Tensor`, *optional*): `[batch or 1, 1, queries, keys]`, true where a query sees a key.
    """

    queries: Interval
    keys: Interval
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """Keys of a sequence that each query sees.

    Args:
        low, high (`Tensor`): `[batch or 1, length]`; query i sees keys `low[i] <= key < high[i]`.
        columns (`Tensor`, *optional*): `[batch, length]`, false for keys that no query sees.
        function (`Callable`, *optional*): queries `[q, 1]`, keys `[1, k]` -> `[batch or 1, q, k]`, true where a query
            sees a key within its interval.
    """

    low: Tensor
    high: Tensor
    columns: Tensor | None = None
    function: Callable[[Tensor, Tensor], Tensor] | None = None

    @classmethod
    def causal(cls, length: int) -> "SequenceMask":
        """Returns the causal mask: every query sees itself and all earlier keys."""
        places = torch.arange(length).unsqueeze(0)
        return cls(torch.zeros_like(places), places + 1)

    @classmethod
    def full(cls, length: int) -> "SequenceMask":
        """Returns the mask with which every query sees every key."""
        places = torch.arange(length).unsqueeze(0)
        return cls(torch.zeros_like(places), torch.full_like(places, length))

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return self.low.shape[1]

    def within(self, low: Tensor | int, high: Tensor | int) -> "SequenceMask":
        """Restricts queries to keys in `[low, high)`; both are `[batch or 1, length]` or an integer."""
        lows, highs = (value if isinstance(value, Tensor) else torch.tensor([[value]]) for value in (low, high))
        return SequenceMask(torch.maximum(self.low, lows), torch.minimum(self.high, highs), self.columns, self.function)

    def window(self, size: int) -> "SequenceMask":
        """Restricts queries to the `size` keys up to themselves, at the lower end only."""
        return self.within(self._places - size + 1, self.length)

    def chunks(self, size: int, begin: Tensor | int = 0) -> "SequenceMask":
        """Restricts queries to their own chunk; the first begins at `begin`, `[batch or 1, length]` or an integer."""
        start = self._places - (self._places - begin) % size
        return self.within(start, start + size)

    def documents(self, borders: Tensor) -> "SequenceMask":
        """Restricts queries to their own document: `borders` `[batch or 1, length]` is true at the start of each."""
        begins = borders.clone()
        begins[:, 0] = True
        start = torch.where(begins, self._places, 0).cummax(1).values
        # Next border to the right of each token.
        after = torch.cat(
            [torch.where(begins, self._places, self.length)[:, 1:], torch.full((len(begins), 1), self.length)], 1
        )
        stop = after.flip(1).cummin(1).values.flip(1)
        return self.within(start, stop)

    def without(self, columns: Tensor) -> "SequenceMask":
        """Masks the keys for which `columns`, `[batch, length]`, is false."""
        kept = columns.bool()
        if self.columns is not None:
            kept = kept & self.columns
        counts = kept.sum(1, keepdim=True)
        first, last = kept.int().argmax(1, keepdim=True), self.length - kept.flip(1).int().argmax(1, keepdim=True)
        # Padding at the ends only shortens the interval; a sequence without keys has an empty one.
        first, last = torch.where(counts > 0, first, 0), torch.where(counts > 0, last, 0)
        masked = self.within(first, last)
        has_holes = bool((counts != last - first).any())
        return SequenceMask(masked.low, masked.high, kept if has_holes else None, self.function)

    def where(self, function: Callable[[Tensor, Tensor], Tensor]) -> "SequenceMask":
        """Restricts queries to keys for which a function of both is true."""
        other = self.function

        def both(queries: Tensor, keys: Tensor) -> Tensor:
            visible = function(queries, keys)
            return visible if other is None else visible & other(queries, keys)

        return SequenceMask(self.low, self.high, self.columns, both)

    @cached_property
    def fully_masked(self) -> Tensor | None:
        """Queries that see no key, `[batch or 1, length]`; `None` if there are none."""
        is_masked = self.low >= self.high
        return is_masked if bool(is_masked.any()) else None

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Tokens that divide the sequence: in at least one sample, no query on either side sees the other side."""
        # Queries that see no key cross no border.
        sees = self.low < self.high
        # Smallest key that this or any later query sees, and end of the keys of this or any earlier query.
        first = torch.where(sees, self.low, self.length).flip(1).cummin(1).values.flip(1)
        last = torch.where(sees, self.high, 0).cummax(1).values
        is_border = (first[:, 1:] >= self._places[:, 1:]) & (last[:, :-1] <= self._places[:, 1:])
        return tuple((is_border.any(0).nonzero().flatten() + 1).tolist())

    @cached_property
    def _places(self) -> Tensor:
        return torch.arange(self.length).unsqueeze(0)

    @cached_property
    def _is_causal(self) -> Tensor:
        """Whether a query's last key is itself in all samples, `[length]`."""
        return (self.high == self._places + 1).all(0)

    def dense(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the mask of queries `[q]` and keys `[k]`, `[batch or 1, q, k]`, true where a query sees a key."""
        row = keys.view(1, 1, -1)
        visible = (row >= self.low[:, queries].unsqueeze(-1)) & (row < self.high[:, queries].unsqueeze(-1))
        if self.columns is not None:
            visible = visible & self.columns[:, keys].unsqueeze(1)
        if self.function is not None:
            visible = visible & self.function(queries.view(-1, 1), keys.view(1, -1))
        return visible

    def blocks(self, queries: Sequence[Interval], keys: Sequence[Interval]) -> Iterator[MaskBlock]:
        """Yields the non-empty blocks of queries in some intervals of the sequence and keys in others.

        Args:
            queries, keys: ascending intervals, of one rank each.
        """
        # Blocks count tokens within their rank: collect the local offset of every key interval.
        offsets, starts, passed = [], [], 0
        for start, stop in keys:
            offsets.append(passed)
            starts.append(start)
            passed += stop - start
        passed = 0
        for start, stop in queries:
            low, high = self._reach((start, stop))
            # Skip key intervals before the first one that any of these queries sees.
            number = max(bisect_right(starts, low) - 1, 0)
            while number < len(keys) and keys[number][0] < high:
                for block in self._cut((start, stop), keys[number]):
                    yield _counted(block, passed - start, offsets[number] - keys[number][0])
                number += 1
            passed += stop - start

    def _reach(self, queries: Interval) -> Interval:
        """Returns the smallest interval that contains all keys that any of these queries sees."""
        span = slice(*queries)
        return int(self.low[:, span].min()), int(self.high[:, span].max())

    def _cut(self, queries: Interval, keys: Interval) -> Iterator[MaskBlock]:
        low, high = self._reach(queries)
        keys = max(keys[0], low), min(keys[1], high)
        if keys[0] >= keys[1]:
            return
        single_block = self._unmasked(queries, keys)
        if single_block is not None:
            yield single_block
        elif queries[1] - queries[0] > TILE:
            # Split into tiles, so that most of them need no mask.
            for start in range(*queries, TILE):
                yield from self._cut((start, min(start + TILE, queries[1])), keys)
        else:
            for part in self._parts(queries, keys):
                block = self._unmasked(queries, part)
                if block is None:
                    block = MaskBlock(
                        queries, part, mask=self.dense(torch.arange(*queries), torch.arange(*part)).unsqueeze(1)
                    )
                if block.mask is None or bool(block.mask.any()):
                    yield block

    def _parts(self, queries: Interval, keys: Interval) -> Iterator[Interval]:
        """Splits keys into those before, within and after the interval that all of the queries see."""
        span = slice(*queries)
        first, last = int(self.low[:, span].max()), int(self.high[:, span].min())
        if bool(self._is_causal[span].all()):
            # The last block is then square and causal.
            last = queries[0]
        borders = [keys[0], *sorted({border for border in (first, last) if keys[0] < border < keys[1]}), keys[1]]
        yield from pairwise(borders)

    def _unmasked(self, queries: Interval, keys: Interval) -> MaskBlock | None:
        """Returns the block of these queries and keys if the kernel needs no mask for it, or `None`."""
        if self.function is not None or (self.columns is not None and not bool(self.columns[:, slice(*keys)].all())):
            return None
        span = slice(*queries)
        if int(self.low[:, span].max()) > keys[0]:
            return None
        if int(self.high[:, span].min()) >= keys[1]:
            return MaskBlock(queries, keys)
        # The kernel's causal flag applies to equal intervals of queries and keys only.
        is_square = queries == keys and bool(self._is_causal[span].all())
        return MaskBlock(queries, keys, causal=True) if is_square else None


def _counted(block: MaskBlock, queries: int, keys: int) -> MaskBlock:
    """Converts a block's positions in the sequence to indices into the ranks' local tokens."""
    return MaskBlock(
        (block.queries[0] + queries, block.queries[1] + queries),
        (block.keys[0] + keys, block.keys[1] + keys),
        block.causal,
        block.mask,
    )
