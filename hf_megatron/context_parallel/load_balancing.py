"""Assignment of a sequence's tokens to ranks: pure arithmetic, without process groups or token tensors.

    zigzag, 2 ranks, 8 tokens    0 0 1 1 1 1 0 0      chunk i of 2 x ranks and its mirror image
    the same per document        0 1 1 0 | 0 1 1 0    zigzag inside each document of a packed sequence

Under a causal mask late tokens attend to more keys than early ones: a zigzag balances both. Lengths need not be
divisible by anything: chunk `i` of `n` begins at `length * i // n`, and a chunk may be empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Interval = tuple[int, int]


def _in_normal_form(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Sorts intervals, drops empty ones and merges adjacent ones."""
    joined: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _chunk(first: int, length: int, number: int, count: int) -> Interval:
    return first + length * number // count, first + length * (number + 1) // count


@dataclass(frozen=True)
class SequenceOrder:
    """Tokens of each rank.

    Args:
        parts: for every rank, the intervals `[start, stop)` of its tokens, ascending.
    """

    parts: tuple[tuple[Interval, ...], ...]

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> "SequenceOrder":
        """Returns the order in which each rank has one contiguous chunk."""
        return cls(tuple(_in_normal_form([_chunk(0, length, rank, ranks)]) for rank in range(ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int, documents: Sequence[int] = ()) -> "SequenceOrder":
        """Returns the order in which each rank has an early and a late chunk (Llama 3, 3.3.2) of each document.

        Args:
            length (`int`): tokens of the sequence.
            ranks (`int`): number of ranks that split it.
            documents: tokens at which another document begins, ascending.
        """
        # A document with fewer tokens than chunks would leave the first ranks without tokens: merge it with the next.
        borders, shortest = [0], 2 * ranks
        for border in documents:
            if borders[-1] + shortest <= border <= length - shortest:
                borders.append(border)
        borders.append(length)
        parts: list[list[Interval]] = [[] for _ in range(ranks)]
        for document, (first, stop) in enumerate(pairwise(borders)):
            for place in range(ranks):
                # Rotate the ranks: the same chunk of every document gets the extra token.
                part = parts[(place + document) % ranks]
                for number in (place, 2 * ranks - 1 - place):
                    part.append(_chunk(first, stop - first, number, 2 * ranks))
        return cls(tuple(_in_normal_form(part) for part in parts))

    def divided(self, ranks: int) -> "SequenceOrder":
        """Returns the order in which each rank's tokens are split over `ranks` neighboring ranks, in sequence order."""
        parts = []
        for part, size in zip(self.parts, self.sizes, strict=True):
            # Consecutive ranks split the tokens of one ring position.
            parts += [cut_intervals(part, *_chunk(0, size, rank, ranks)) for rank in range(ranks)]
        return SequenceOrder(tuple(parts))

    @property
    def ranks(self) -> int:
        return len(self.parts)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(stop - start for start, stop in part) for part in self.parts)

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return sum(self.sizes)

    def tokens(self, rank: int) -> Tensor:
        """Returns a rank's tokens `[local]` as positions in the sequence."""
        return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in self.parts[rank])])

    @cached_property
    def natural(self) -> Tensor:
        """Index of each token of the sequence, `[length]`, in the concatenation of the ranks' padded tokens."""
        width = max(self.sizes, default=0)
        positions = torch.empty(self.length, dtype=torch.int64)
        for rank in range(self.ranks):
            tokens = self.tokens(rank)
            # Rank r's tokens start at r * width in the gathered tensor.
            positions[tokens] = rank * width + torch.arange(len(tokens))
        return positions


def cut_intervals(part: Sequence[Interval], first: int, last: int) -> tuple[Interval, ...]:
    """Returns the tokens `[first, last)` of those in the intervals, counted within them, as intervals."""
    intervals, passed = [], 0
    for start, stop in part:
        low, high = max(first - passed, 0), min(last - passed, stop - start)
        if low < high:
            intervals.append((start + low, start + high))
        passed += stop - start
    return _in_normal_form(intervals)
