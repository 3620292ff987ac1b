"""Which part of each parameter a data parallel rank owns, and the flat rows that parts travel in.

Rank r of S owns the entries `[r * width, (r + 1) * width)` of a flattened local parameter, `width = ceil(entries / S)`.
The rule looks at one parameter alone: freezing another, or another bucket size, moves nothing. A bucket lays several
parameters side by side in rows `[S, width of all]`, row r what rank r owns of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..compat.torch_memory import share_memory
from ..core.communication.collectives import bounds
from .grad_sync_groups import GradSyncGroup


def owned_range(entries: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the `[start, stop)` of the flattened local parameter that `rank` owns; the last may own nothing."""
    return bounds(entries, ranks, rank)


@dataclass
class Slot:
    """A parameter's columns in the rows of a bucket."""

    parameter: nn.Parameter
    start: int
    width: int
    entries: int

    def scatter_into(self, rows: Tensor, local: Tensor, *, factor: float, add: bool) -> None:
        """Writes (or adds) `local` of any shape times `factor` into its columns of `rows` `[ranks, width]`.

        Columns beyond its end stay.
        """
        for columns, part in self._pairs(rows, local.reshape(-1)):
            if add:
                columns.add_(part, alpha=factor)
            elif part.dtype == columns.dtype:
                torch.mul(part, factor, out=columns)
            else:
                # The product of a half-precision tensor would be rounded before it is widened.
                columns.copy_(part).mul_(factor)

    def collect_from(self, rows: Tensor, local: Tensor) -> None:
        """Writes the slot's columns of `rows` `[ranks, width]` into a contiguous local tensor of any shape."""
        for columns, part in self._pairs(rows, local.view(-1)):
            part.copy_(columns)

    def _pairs(self, rows: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        full_rows = self.entries // self.width if self.width else 0
        pairs = []
        if full_rows:
            columns = rows[:full_rows, self.start : self.start + self.width]
            pairs.append((columns, flat[: full_rows * self.width].view(full_rows, self.width)))
        rest = self.entries - full_rows * self.width
        if rest:
            pairs.append((rows[full_rows, self.start : self.start + rest], flat[full_rows * self.width :]))
        return pairs

    def own_columns(self, row: Tensor, ranks: int, rank: int) -> Tensor:
        """Returns this rank's entries in its row `[width]`."""
        start, stop = owned_range(self.entries, ranks, rank)
        return row[self.start : self.start + stop - start]


@dataclass
class GradBuffer:
    """What a bucket has added up: gradients of this rank alone, reduced ones, and the slots that have them."""

    rows: Tensor | None = None
    recv_buffer: Tensor | None = None
    shard: Tensor | None = None
    in_rows: bool = False
    written: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)

    def copy(self) -> "GradBuffer":
        """Copies the gradients; memory without any is left out."""
        rows = self.rows.clone() if self.rows is not None and self.written else None
        shard = None if self.shard is None else self.shard.clone()
        return GradBuffer(rows, None, shard, False, set(self.written), set(self.used))


class Bucket:
    """Parameters whose gradients are reduced together, and the state of that reduction.

    The rows end in one column per parameter that counts the ranks which have a gradient of it, so that every rank
    learns of parameters that nobody used.

    Attributes:
        rows (`Tensor`, *optional*): `[ranks, width + parameters]`, this rank's gradient, not reduced yet.
        shard (`Tensor`, *optional*): `[width]`, the reduced gradient of what this rank owns.
        recv_buffer (`Tensor`, *optional*): `[ranks - 1, width + parameters]`, what arrives of other ranks' rows, where
            ranks send them one by one.
        flags (`Tensor`, *optional*): `[parameters]`, on how many ranks each has a gradient, until somebody reads it.
        in_rows: the shard lies in this rank's row, until there are new gradients.
        written: indices of slots that hold a gradient of this window; `arrived` those of the last backward.
        used: indices of slots whose parameter has a gradient on some rank.
    """

    def __init__(self, slots: Sequence[Slot], sharing: GradSyncGroup, dtype: torch.dtype, device: torch.device):
        self.slots, self.sharing, self.dtype, self.device = slots, sharing, dtype, device
        self.ranks = sharing.shard_size
        self.width = slots[-1].start + slots[-1].width
        self.rows: Tensor | None = None
        self.shard: Tensor | None = None
        self.written: set[int] = set()
        self.arrived: set[int] = set()
        self.used: set[int] = set()
        self.recv_buffer: Tensor | None = None
        self.flags: Tensor | None = None
        # What this rank had no gradient of when `flags` were added up.
        self._without_grad: set[int] = set()
        self.in_rows = False

    def open_buffer(self) -> Tensor:
        """Returns the rows, `[ranks, width + parameters]`, for new gradients, and makes them where there are none."""
        if self.in_rows:
            assert self.shard is not None
            if self.ranks == 1:
                # All of them is the shard.
                self.rows = None
            else:
                self.shard = self.shard.clone()
            self.in_rows = False
        if self.rows is None:
            self.rows = self._make_rows(self.ranks)
        return self.rows

    def _make_rows(self, rows: int) -> Tensor:
        return torch.empty((rows, self.width + len(self.slots)), dtype=self.dtype, device=self.device)

    def open_shard(self) -> Tensor:
        """Returns the reduced gradient `[width]`, and makes one of zeros where there is none."""
        if self.shard is None:
            self.shard = torch.zeros(self.width, dtype=self.dtype, device=self.device)
        return self.shard

    def seal_buffer(self) -> Tensor:
        """Completes the rows `[ranks, width + parameters]`: zeros where this rank has no gradient, and the flags."""
        rows = self.open_buffer()
        for index, slot in enumerate(self.slots):
            if index not in self.written:
                rows[:, slot.start : slot.start + slot.width].zero_()
        flags = rows[:, self.width :]
        flags.fill_(1)
        for index in range(len(self.slots)):
            if index not in self.written:
                flags[:, index] = 0
        return rows

    def take_inbox(self) -> Tensor:
        """Returns memory `[ranks - 1, width + parameters]` for other ranks' rows; the last may hold the shard."""
        if self.recv_buffer is None or self.shard is not None:
            self.recv_buffer = self._make_rows(max(self.ranks - 1, 1))
        return self.recv_buffer

    def own_segment(self, *, keep: bool) -> Tensor:
        """Returns memory `[1, width + parameters]` for the sum of this rank's row: the row itself if rows are kept."""
        rank = self.sharing.shard_rank
        return self.open_buffer()[rank : rank + 1] if keep else self._make_rows(1)

    def take_in(self, reduced: Tensor, *, keep: bool) -> None:
        """Adds the sum over the data parallel ranks, `[width + parameters]`, to the shard."""
        if len(self.written) == len(self.slots):
            self.used.update(range(len(self.slots)))
        else:
            self.flags = reduced[self.width :].float()
            self._without_grad = set(range(len(self.slots))) - self.written
        gradient = reduced[: self.width]
        if self.shard is not None:
            self.shard.add_(gradient)
        else:
            # Of a receive buffer that has other rows too, it would keep these.
            is_alone = self.recv_buffer is None or self.recv_buffer.shape[0] == 1
            self.shard = gradient if keep or is_alone else gradient.clone()
            self.in_rows = keep and self.rows is not None and share_memory(gradient, self.rows)
        if not keep:
            self.rows = self.recv_buffer = None
        self.written.clear()
        self.arrived.clear()

    def take_flags(self, counts: Sequence[float]) -> list[int]:
        """Takes in how many ranks have a gradient of each parameter; returns the slots of those that others have."""
        self.used.update(index for index, count in enumerate(counts) if count)
        self.flags = None
        return sorted(self._without_grad & self.used)

    def exchange(self, other: GradBuffer) -> GradBuffer:
        """Puts another sum in place of the present one, which is returned; no reduction may be under way."""
        before = GradBuffer(self.rows, self.recv_buffer, self.shard, self.in_rows, self.written, self.used)
        self.rows, self.recv_buffer, self.shard, self.in_rows, self.written, self.used = (
            other.rows,
            other.recv_buffer,
            other.shard,
            other.in_rows,
            other.written,
            other.used,
        )
        return before

    def add(self, other: GradBuffer, factor: float | Tensor) -> None:
        """Adds `factor`, a number or scalar, times another sum, which is used up; no reduction may be under way."""
        if not self.written and self.shard is None:
            self.exchange(other)
            if isinstance(factor, Tensor) or factor != 1:
                self._scale(factor)
            return
        if other.rows is not None and other.written:
            rows = self.open_buffer()
            for index in other.written:
                slot = self.slots[index]
                columns, added = (r[:, slot.start : slot.start + slot.width] for r in (rows, other.rows))
                if index in self.written:
                    _add_times(columns, added, factor)
                else:
                    torch.mul(added, factor, out=columns)
            self.written |= other.written
        if other.shard is not None:
            if self.shard is not None:
                _add_times(self.shard, other.shard, factor)
            else:
                # A view of one row would keep all of them.
                self.shard = (other.shard.clone() if other.in_rows and self.ranks > 1 else other.shard).mul_(factor)
            self.used |= other.used

    def _scale(self, factor: float | Tensor) -> None:
        if self.shard is not None:
            self.shard.mul_(factor)
        if self.rows is not None and self.written:
            self.rows.mul_(factor)

    def discard_slots(self, indices: set[int], *, keep: bool) -> None:
        """Forgets the gradients of some parameters."""
        if indices >= self.written | self.used:
            self.discard(keep=keep)
            return
        for index in indices:
            if self.shard is not None:
                self.shard[self.slots[index].start :][: self.slots[index].width].zero_()
        self.written -= indices
        self.arrived -= indices
        self.used -= indices

    def discard(self, *, keep: bool) -> None:
        """Forgets all gradients; `keep` keeps their memory."""
        self.shard, self.in_rows = None, False
        for indices in (self.written, self.arrived, self.used):
            indices.clear()


def _add_times(total: Tensor, added: Tensor, factor: float | Tensor) -> None:
    """Adds `factor`, a number or scalar, times a tensor to another of its shape."""
    if isinstance(factor, Tensor):
        total.addcmul_(added, factor)
    else:
        total.add_(added, alpha=factor)
