"""Gradient buckets: which entries of each parameter a data-parallel rank owns, and the flat buffers they travel in.

Rank r of S owns the entries `[r * width, (r + 1) * width)` of a flattened local parameter, `width = ceil(entries / S)`.
The rule depends on that parameter only: freezing another one, or changing the bucket size, does not move its shards. A
bucket concatenates several parameters along the columns of a buffer `[S, sum of widths]`, whose row r holds the entries
that rank r owns of each.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..compat.torch_memory import share_memory
from ..core.communication.collectives import bounds
from .grad_sync_groups import GradSyncGroup


# Cached: several calls per parameter and step, always with the same sizes.
@functools.lru_cache(maxsize=4096)
def owned_range(entries: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the `[start, stop)` of the flattened local parameter that `rank` owns; the last ranks may own nothing."""
    return bounds(entries, ranks, rank)


class GradScale:
    """Factor of gradients before their reduction, as a number and as tensors.

    A product with a number first creates a tensor, which costs more than the product of a small gradient. The tensors
    belong to a bucket and not to the process: in a dry run they are fake, and a later model must not get them.
    """

    def __init__(self, factor: float, device: torch.device):
        self.factor, self.device = factor, device
        # On CPUs, from where a scalar multiplies tensors of any device.
        self._scalar = torch.tensor(factor, dtype=torch.float32, device="cpu")
        # Has a dim, so that products with half-precision gradients are computed in fp32.
        self._promoting = torch.full((1,), factor, dtype=torch.float32, device=device)

    def write(self, columns: Tensor, part: Tensor) -> None:
        """Writes `factor * part` into columns of its shape and any dtype."""
        if self.factor == 1:
            columns.copy_(part)
        elif part.dtype is not columns.dtype:
            # The product is computed in fp32: a half-precision one would be rounded before the cast.
            torch.mul(part, self._promoting, out=columns)
        else:
            # A number is not rounded to the dtype of the gradient.
            torch.mul(part, self._scalar if part.dtype is torch.float32 else self.factor, out=columns)


@dataclass
class Slot:
    """A parameter's columns in the buffer of a bucket.

    Attributes:
        start: first column.
        width: number of columns, `ceil(entries / ranks)`.
        entries: number of entries of the local parameter; the padding is in the last rows.
        is_even: whether it has entries and no padding.
    """

    parameter: nn.Parameter
    start: int
    width: int
    entries: int
    is_even: bool

    def scatter_into(self, columns: Tensor, local: Tensor, *, scale: GradScale, add: bool) -> None:
        """Writes (or adds) the scaled `local`, of any shape, into its columns `[ranks, width]` of the buffer.

        The padding after the last entry is not written.
        """
        if self.is_even:
            # The usual case, once per parameter in each backward: few views and no Python call.
            part = local.reshape(-1, self.width)
            if add:
                columns.add_(part, alpha=scale.factor)
            else:
                scale.write(columns, part)
            return
        for written, part in zip(self.cut_columns(columns), self.cut(local.reshape(-1)), strict=True):
            if add:
                written.add_(part, alpha=scale.factor)
            else:
                scale.write(written, part)

    def cut_columns(self, columns: Tensor) -> list[Tensor]:
        """Returns views without padding of its columns `[ranks, width]`: of full rows, and of the row after them."""
        if self.is_even:
            return [columns]
        full_rows, rest = divmod(self.entries, self.width) if self.width else (0, 0)
        return [columns[:full_rows]] * bool(full_rows) + [columns[full_rows, :rest]] * bool(rest)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Returns views of all entries `[entries]`, with the shapes of `cut_columns`."""
        full_rows, rest = divmod(self.entries, self.width) if self.width else (0, 0)
        size = full_rows * self.width
        return [flat[:size].view(full_rows, self.width)] * bool(full_rows) + [flat[size:]] * bool(rest)

    def own_columns(self, row: Tensor, ranks: int, rank: int) -> Tensor:
        """Returns this rank's entries in its row `[width]`."""
        start, stop = owned_range(self.entries, ranks, rank)
        return row[self.start : self.start + stop - start]


@dataclass
class GradBuffer:
    """Accumulated gradients of a bucket, which can be exchanged for others; see `Bucket` for the attributes."""

    rows: Tensor | None = None
    recv_buffer: Tensor | None = None
    shard: Tensor | None = None
    in_rows: bool = False
    written: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)

    def copy(self) -> "GradBuffer":
        """Returns a copy of the gradients; buffers without gradients are not copied."""
        rows = self.rows.clone() if self.rows is not None and self.written else None
        shard = None if self.shard is None else self.shard.clone()
        return GradBuffer(rows, None, shard, False, set(self.written), set(self.used))


class Bucket:
    """Parameters whose gradients are reduced together, and the state of that reduction.

    The buffer ends in one flag column per parameter. The reduction sums the flags, so every rank learns how many ranks
    have a gradient of each parameter; a parameter without any keeps `.grad = None`.

    A slot may be in several sets of states at once:

    | set | gradient of the slot | from | until |
    |---|---|---|---|
    | `arrived` | received in the current backward | `GradientReducer.accumulate` | the reduction or next forward |
    | `written` | in `rows`, not reduced | `GradientReducer.accumulate` | the reduction (`take_in`) |
    | `used` | in `shard`, from any rank | `take_in`, `take_flags` | the gradient is discarded |

    Attributes:
        rows (`Tensor`, *optional*): `[ranks, width + parameters]`, this rank's gradients, not reduced yet.
        shard (`Tensor`, *optional*): `[width]`, the reduced gradients of the entries that this rank owns.
        columns: the columns `[ranks, width]` of each slot in `rows`, and the flags'; `None` until they are needed.
        recv_buffer (`Tensor`, *optional*): `[ranks - 1, width + parameters]`, receives the other ranks' segments in
            point-to-point reductions (gloo).
        flags (`Tensor`, *optional*): `[parameters]`, number of ranks with a gradient of each, until it is read.
        in_rows: whether the shard is a view of this rank's row, until new gradients are accumulated.
        keys: the identities of the parameters, in the order of the slots.
        owns_all_columns: whether this rank's row has no padding.
        scale: scales gradients before the reduction; only buckets of a `GradientReducer` have it.
        written: indices of slots with gradients that are not reduced yet.
        arrived: indices of slots that received a gradient in the current backward.
        used: indices of slots whose parameter has a reduced gradient on any rank.
    """

    scale: GradScale

    def __init__(self, slots: Sequence[Slot], sharing: GradSyncGroup, dtype: torch.dtype, device: torch.device):
        self.slots, self.sharing, self.dtype, self.device = slots, sharing, dtype, device
        self.ranks = sharing.shard_size
        self.width = slots[-1].start + slots[-1].width
        self.keys = [id(slot.parameter) for slot in slots]
        self._widths = [slot.width for slot in slots]
        self._owned = [_length(owned_range(slot.entries, self.ranks, sharing.shard_rank)) for slot in slots]
        self.owns_all_columns = self._owned == self._widths
        self.rows: Tensor | None = None
        self.columns: tuple[Tensor, ...] | None = None
        self.shard: Tensor | None = None
        self.written: set[int] = set()
        self.arrived: set[int] = set()
        self.used: set[int] = set()
        self.recv_buffer: Tensor | None = None
        self.flags: Tensor | None = None
        # Slots without a gradient on this rank when `flags` were reduced.
        self._off_stage: set[int] = set()
        self.in_rows = False

    def open_buffer(self) -> Tensor:
        """Returns the buffer `[ranks, width + parameters]` for new gradients; allocates it if necessary."""
        if self.in_rows:
            assert self.shard is not None
            if self.ranks == 1:
                # The only row is the shard: leave it there, and allocate a new buffer below.
                self.free_buffer()
            else:
                # New gradients will overwrite this rank's row: move the shard out.
                self.shard = self.shard.clone()
            self.in_rows = False
        if self.rows is None:
            self.rows = self._make_rows(self.ranks)
        return self.rows

    def open_columns(self) -> tuple[Tensor, ...]:
        """Returns the columns `[ranks, width]` of each slot in the open buffer."""
        if self.in_rows or self.columns is None:
            # Views that stay with the buffer: backwards write to them once per parameter.
            with torch.no_grad():
                self.columns = self.open_buffer().split_with_sizes([*self._widths, len(self.slots)], 1)
        return self.columns

    def free_buffer(self) -> None:
        """Releases the buffer."""
        self.rows = self.columns = None

    def list_owned(self, row: Tensor) -> list[Tensor]:
        """Returns this rank's entries `[entries]` of each slot in its row `[width]` or longer."""
        parts = row[: self.width].split_with_sizes(self._widths)
        if self.owns_all_columns:
            return list(parts)
        # The last ranks have padding.
        return [part[:length] for part, length in zip(parts, self._owned, strict=True)]

    def _make_rows(self, rows: int) -> Tensor:
        return torch.empty((rows, self.width + len(self.slots)), dtype=self.dtype, device=self.device)

    def open_shard(self) -> Tensor:
        """Returns the reduced gradients `[width]`; creates zeros if there are none."""
        if self.shard is None:
            self.shard = torch.zeros(self.width, dtype=self.dtype, device=self.device)
        return self.shard

    def seal_buffer(self) -> Tensor:
        """Returns the buffer `[ranks, width + parameters]`, ready to be reduced.

        Slots without a gradient on this rank are zeroed, and the flag columns are set.
        """
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

    def take_recv_buffer(self) -> Tensor:
        """Returns a receive buffer `[ranks - 1, width + parameters]` for the other ranks' segments."""
        # The shard may be a view of the last one, which must not be overwritten.
        if self.recv_buffer is None or self.shard is not None:
            self.recv_buffer = self._make_rows(max(self.ranks - 1, 1))
        return self.recv_buffer

    def own_segment(self, *, keep: bool) -> Tensor:
        """Returns the output `[1, width + parameters]` of a reduce-scatter: this rank's row itself if `keep`."""
        rank = self.sharing.shard_rank
        return self.open_buffer()[rank : rank + 1] if keep else self._make_rows(1)

    def take_in(self, reduced: Tensor, *, keep: bool) -> None:
        """Adds the reduced segment `[width + parameters]` of this rank to the shard.

        Args:
            keep (`bool`): whether the buffer is kept for the next backward (ZeRO stages 0 and 1).
        """
        if len(self.written) == len(self.slots):
            # This rank has all gradients: the flags need not be read, which would wait for the device.
            self.used.update(range(len(self.slots)))
        else:
            self.flags = reduced[self.width :].float()
            self._off_stage = set(range(len(self.slots))) - self.written
        gradient = reduced[: self.width]
        if self.shard is not None:
            self.shard.add_(gradient)
        else:
            # A view of a receive buffer with several segments would keep all of them alive.
            is_alone = self.recv_buffer is None or self.recv_buffer.shape[0] == 1
            self.shard = gradient if keep or is_alone else gradient.clone()
            self.in_rows = keep and self.rows is not None and share_memory(gradient, self.rows)
        if not keep:
            self.recv_buffer = None
            self.free_buffer()
        self.written.clear()
        self.arrived.clear()

    def take_flags(self, counts: Sequence[float]) -> list[int]:
        """Records how many ranks have a gradient of each parameter.

        Args:
            counts: `[parameters]`, the values of `flags`.

        Returns:
            the slots whose gradient comes from other ranks only.
        """
        self.used.update(index for index, count in enumerate(counts) if count)
        self.flags = None
        return sorted(self._off_stage & self.used)

    def exchange(self, other: GradBuffer) -> GradBuffer:
        """Replaces the accumulated gradients and returns the previous ones; no reduction may be in flight."""
        before = GradBuffer(self.rows, self.recv_buffer, self.shard, self.in_rows, self.written, self.used)
        self.free_buffer()
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
        """Adds `factor` times other gradients, whose memory is reused; no reduction may be in flight."""
        if not self.written and self.shard is None:
            # Nothing is accumulated yet: take the buffers over instead of adding to zeros.
            self.exchange(other)
            if isinstance(factor, Tensor) or factor != 1:
                self._scale(factor)
            return
        if other.rows is not None and other.written:
            rows = self.open_buffer()
            for index in other.written:
                slot = self.slots[index]
                # [ranks, slot width] of each buffer.
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
                # A view of one row would keep the full buffer alive.
                self.shard = (other.shard.clone() if other.in_rows and self.ranks > 1 else other.shard).mul_(factor)
            self.used |= other.used

    def _scale(self, factor: float | Tensor) -> None:
        if self.shard is not None:
            self.shard.mul_(factor)
        if self.rows is not None and self.written:
            self.rows.mul_(factor)

    def discard_slots(self, indices: set[int], *, keep: bool) -> None:
        """Discards the gradients of some parameters."""
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
        """Discards all gradients; with `keep` their buffers stay allocated for the next backward."""
        self.shard, self.in_rows = None, False
        if not keep:
            self.recv_buffer = None
            self.free_buffer()
        for indices in (self.written, self.arrived, self.used):
            indices.clear()


def _length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0]


def _add_times(total: Tensor, added: Tensor, factor: float | Tensor) -> None:
    """Adds `factor * added` to `total` in place; both have the same shape, and a tensor `factor` is a scalar."""
    if isinstance(factor, Tensor):
        total.addcmul_(added, factor)
    else:
        total.add_(added, alpha=factor)
