"""Which tokens of a row each rank holds: pure arithmetic, no groups and no tensors of tokens.

    zigzag, 2 ranks, 8 tokens    0 0 1 1 1 1 0 0      chunk i of 2 x ranks and its mirror image
    the same by document         0 1 1 0 | 0 1 1 0    zigzag inside of each document of a packed row

Under a causal mask late tokens see more than early ones: a zigzag gives every rank as much of both. Lengths need not
be divisible by anything: chunk `i` of `n` begins at `length * i // n`, and a chunk may be empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Interval = tuple[int, int]


def _in_normal_form(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Sorts intervals, without empty ones, neighbours made one."""
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
    """The tokens of each rank.

    Args:
        parts: of every rank the `[start, stop)` of tokens that it holds, ascending.
    """

    parts: tuple[tuple[Interval, ...], ...]

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> "SequenceOrder":
        """Gives each rank one chunk."""
        return cls(tuple(_in_normal_form([_chunk(0, length, rank, ranks)]) for rank in range(ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int, documents: Sequence[int] = ()) -> "SequenceOrder":
        """Gives each rank an early and a late chunk (Llama 3, 3.3.2), of each document.

        Args:
            length (`int`): of the row, in tokens.
            ranks (`int`): that share it.
            documents: tokens at which another document begins, ascending.
        """
        # Of fewer tokens than chunks the first ranks would get none: such documents are one with the next.
        borders, shortest = [0], 2 * ranks
        for border in documents:
            if borders[-1] + shortest <= border <= length - shortest:
                borders.append(border)
        borders.append(length)
        parts: list[list[Interval]] = [[] for _ in range(ranks)]
        for document, (first, stop) in enumerate(pairwise(borders)):
            for place in range(ranks):
                # The same chunks of all documents are a token longer.
                part = parts[(place + document) % ranks]
                for number in (place, 2 * ranks - 1 - place):
                    part.append(_chunk(first, stop - first, number, 2 * ranks))
        return cls(tuple(_in_normal_form(part) for part in parts))

    def divided(self, ranks: int) -> "SequenceOrder":
        """Shares out what each rank holds over so many neighbouring ranks, in its order."""
        parts = []
        for part, size in zip(self.parts, self.sizes, strict=True):
            parts += [cut_intervals(part, *_chunk(0, size, rank, ranks)) for rank in range(ranks)]
        return SequenceOrder(tuple(parts))

    @property
    def ranks(self) -> int:
        return len(self.parts)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(stop - start for start, stop in part) for part in self.parts)

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return sum(self.sizes)

    def tokens(self, rank: int) -> Tensor:
        """Returns the tokens of a rank, `[held]`, as they lie in the row."""
        return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in self.parts[rank])])

    @cached_property
    def natural(self) -> Tensor:
        """Where each token of the row, `[length]`, lies among the ranks' tokens that were padded to equal sizes."""
        width = max(self.sizes, default=0)
        found = torch.empty(self.length, dtype=torch.int64)
        for rank in range(self.ranks):
            tokens = self.tokens(rank)
            found[tokens] = rank * width + torch.arange(len(tokens))
        return found


def cut_intervals(part: Sequence[Interval], first: int, last: int) -> tuple[Interval, ...]:
    """Cuts the tokens `[first, last)` out of those that intervals hold, counted within them."""
    found, passed = [], 0
    for start, stop in part:
        low, high = max(first - passed, 0), min(last - passed, stop - start)
        if low < high:
            found.append((start + low, start + high))
        passed += stop - start
    return _in_normal_form(found)
