"""Comparison of two recorded steps: the first weight, output, gradient, or update that differs."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .recorded_shards import Event, OfRank, Recording, compute_indices, part_of
from .recording import AFTER, BEFORE, GRADIENT, LOSS, OUTPUT, OUTPUT_GRADIENT

# In units of the dtype's epsilon, at the first layer: allows for another order of summation.
_ROUND_OFF = 32
# Limit for gradients, relative to the tensor's largest entry, and for losses. Small gradients are compared relative
# to `_FLOOR` times the largest gradient of all.
_LIMIT, _FLOOR = 2e-5, 5e-3
# Limit for weight updates: RMS error relative to the RMS of the update.
_UPDATE = 0.01
# Number of differences listed after the first.
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two recordings by more than round-off.

    Attributes:
        kind: `"weight before the step"`, `"output"`, `"loss"`, `"gradient of the output"`, `"gradient"`,
            `"weight after the step"`.
        name: of the module or parameter.
        ranks: ranks of the second recording whose shard differs.
        error, limit: relative.
        rows, tokens: first and last sample and token that differ, for hidden states.
        like: another weight of the first recording with the same values, as when layers were swapped.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    error: float
    limit: float
    rows: tuple[int, int] | None = None
    tokens: tuple[int, int] | None = None
    like: str = ""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        text = f"{self.kind} {self.name}".rstrip() + f" on rank{'s' if len(self.ranks) > 1 else ''} {ranks}"
        if self.rows is not None and self.tokens is not None:
            text += f", rows {self.rows[0]} to {self.rows[1]}, tokens {self.tokens[0]} to {self.tokens[1]}"
        text += f": off by {self.error:.2g}, limit {self.limit:.1g}"
        return text + (f"; it equals {self.like}" if self.like else "")


@dataclass(frozen=True)
class Divergence:
    """The differences between two recordings, in execution order of the step.

    Attributes:
        differences: the first is where the recordings diverge; the others follow from it or have causes of their own.
        only_first, only_second: names that only one recording has.
        compared (`int`): number of tensors in both.
    """

    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    compared: int

    @property
    def first(self) -> Difference | None:
        """The first difference, if any."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        lines = [f"{self.compared} tensors compared, {len(self.differences)} differ"]
        if self.first is not None:
            lines += [f"first: {self.first}", *(f"then: {one}" for one in self.differences[1 : 1 + _SHOWN])]
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"only in the {which} recording: {', '.join(names[:_SHOWN])}{more}")
        return "\n".join(lines)


def compare_recordings(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Divergence:
    """Compares two recordings of the same batch, with any layouts, in the execution order of the first one's step.

    The limits for outputs and their gradients grow with the number of layers passed, forward and backward.

    Raises:
        ConfigError: a folder without a recording.
    """
    one, other = Recording(first), Recording(second)
    common = [event for event in _in_order(one) if event in other.events]
    differences = [difference for event in common if event[0] == BEFORE for difference in _weights(one, other, event)]
    differences += [difference for event in common if event[0] == OUTPUT for difference in _hidden(one, other, event)]
    differences += _losses(one, other)
    differences += [
        difference for event in common if event[0] == OUTPUT_GRADIENT for difference in _hidden(one, other, event)
    ]
    largest = max((float(one.unsharded(event).abs().max()) for event in common if event[0] == GRADIENT), default=0.0)
    floor = _FLOOR * largest
    differences += [d for event in common if event[0] == GRADIENT for d in _weights(one, other, event, floor=floor)]
    differences += [d for event in common if event[0] == AFTER for d in _updates(one, other, event)]
    return Divergence(
        tuple(differences),
        tuple(f"{kind} {name}" for kind, name, _ in one.events if (kind, name, _) not in other.events),
        tuple(f"{kind} {name}" for kind, name, _ in other.events if (kind, name, _) not in one.events),
        len(common),
    )


def _in_order(recording: Recording) -> Iterator[Event]:
    """Yields events in execution order: output gradients from the last pipeline stage to the first."""
    forward = [event for event in recording.events if event[0] != OUTPUT_GRADIENT]
    by_depth = sorted(
        (event for event in recording.events if event[0] == OUTPUT_GRADIENT),
        key=lambda event: (-_depth(recording.events[event]), recording.events[event][0].piece.order),
    )
    yield from (*forward, *by_depth)


def _depth(pieces: Sequence[OfRank]) -> int:
    return max(one.piece.depth for one in pieces)


def _hidden(one: Recording, other: Recording, event: Event) -> Iterator[Difference]:
    """Compares hidden states, or their gradients, token by token."""
    unsharded = one.unsharded(event)
    finite = unsharded[unsharded.isfinite()]
    scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    scale = scale or 1e-30
    ratio = one.averaging_ranks / other.averaging_ranks if event[0] == OUTPUT_GRADIENT else 1.0
    depth = _depth(one.events[event])
    if event[0] == OUTPUT_GRADIENT:
        depth = 2 * one.depth - depth
    limit = _ROUND_OFF * _precision(one, event) * (1 + depth)
    ranks, rows, tokens, worst = [], [], [], 0.0
    for piece in other.events[event]:
        values = other.read(piece)
        places = compute_indices(piece.piece, values, unsharded.shape[-1])
        expected = part_of(unsharded, places)
        if expected is None or expected.shape != values.shape:
            yield Difference(event[0], event[1], (piece.rank,), float("inf"), limit)
            continue
        # NaN marks tokens that no rank of the first recording holds.
        known = ~expected.isnan().any(-1)
        errors = _difference(values * ratio, expected).square().mean(-1).sqrt() / scale
        errors = torch.where(known, errors.nan_to_num(nan=float("inf"), posinf=float("inf")), 0.0)
        if bool((errors > limit).any()):
            ranks.append(piece.rank)
            worst = max(worst, float(errors.max()))
            apart = torch.nonzero(errors > limit)
            rows += places[0][apart[:, 0]].tolist()
            tokens += places[1][apart[:, 1]].tolist()
    if ranks:
        where = (min(rows), max(rows)), (min(tokens), max(tokens))
        yield Difference(event[0], event[1], tuple(dict.fromkeys(ranks)), worst, limit, *where)


def _difference(values: Tensor, expected: Tensor) -> Tensor:
    """Returns `values - expected`; 0 for entries that are non-finite in both."""
    return torch.where(values.isfinite() | expected.isfinite(), values - expected, 0.0)


def _weights(one: Recording, other: Recording, event: Event, floor: float = 0.0) -> Iterator[Difference]:
    """Compares weights, or their gradients, by the largest entry."""
    unsharded = one.unsharded(event)
    finite = unsharded[unsharded.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, floor) or 1e-30
    limit = 0.0 if event[0] == BEFORE else _LIMIT
    ranks, worst = [], 0.0
    for piece in other.events[event]:
        values = other.read(piece)
        expected = part_of(
            unsharded, compute_indices(piece.piece, values, unsharded.shape[-1] if unsharded.dim() else 1)
        )
        if expected is None or expected.shape != values.shape:
            yield Difference(event[0], event[1], (piece.rank,), float("inf"), limit)
            continue
        apart = _difference(values, expected).abs()
        error = apart.max().nan_to_num(nan=float("inf")) / scale if values.numel() else 0.0
        if float(error) > limit:
            ranks.append(piece.rank)
            worst = max(worst, float(error))
    if ranks:
        like = _same_weight(one, event, other.unsharded(event)) if event[0] == BEFORE else ""
        yield Difference(event[0], event[1], tuple(ranks), worst, limit, like=like)


def _updates(one: Recording, other: Recording, event: Event) -> Iterator[Difference]:
    """Compares the RMS of a weight's update: a single entry with almost no gradient may move either way."""
    before = (BEFORE, *event[1:])
    if before not in one.events or before not in other.events:
        return
    full_update = one.unsharded(event) - one.unsharded(before)
    finite = full_update[full_update.isfinite()]
    scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    ranks, worst = [], 0.0
    starts = {piece.rank: piece for piece in other.events[before]}
    for piece in other.events[event]:
        values = other.read(piece) - other.read(starts[piece.rank])
        expected = part_of(
            full_update, compute_indices(piece.piece, values, full_update.shape[-1] if full_update.dim() else 1)
        )
        if expected is None or expected.shape != values.shape:
            yield Difference(event[0], event[1], (piece.rank,), float("inf"), _UPDATE)
            continue
        apart = _difference(values, expected).square()
        error = float(apart.mean().sqrt().nan_to_num(nan=float("inf"))) if values.numel() else 0
        if error > _UPDATE * (scale or 1e-30):
            ranks.append(piece.rank)
            worst = max(worst, error / (scale or 1e-30))
    if ranks:
        yield Difference(event[0], event[1], tuple(ranks), worst, _UPDATE)


def _same_weight(one: Recording, event: Event, values: Tensor) -> str:
    """Returns the name of another weight of the recording with these values; `""` if there is none."""
    for other in one.events:
        if other[0] == BEFORE and other != event:
            unsharded = one.unsharded(other)
            if unsharded.shape == values.shape and torch.equal(unsharded, values) and bool(unsharded.std() > 0):
                return other[1]
    return ""


def _losses(one: Recording, other: Recording) -> list[Difference]:
    expected = sum(one.losses.values()) / len(one.losses)
    limit = _LIMIT
    # Losses that are non-finite in both recordings count as equal.
    losses = {rank: value for rank, value in other.losses.items() if math.isfinite(value) or math.isfinite(expected)}
    errors = {rank: abs(value - expected) / max(abs(expected), 1e-30) for rank, value in losses.items()}
    ranks = tuple(rank for rank, error in errors.items() if not error <= limit)
    return [Difference(LOSS, "", ranks, max(errors.values()), limit)] if ranks else []


def _precision(recording: Recording, event: Event) -> float:
    piece = recording.events[event][0]
    return torch.finfo(recording.dtype(piece)).eps
