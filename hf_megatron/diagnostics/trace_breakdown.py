"""Merges the traces of all ranks of a job: time per rank in computation, in communication by axis, and in waits."""

import json
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.io.safe_paths import replace_file
from .rank_trace import Communication, RankTrace

Span = tuple[float, float]
_COMPUTE, _COMMUNICATION = 0, 1


@dataclass
class TraceShares:
    """Breakdown of one rank's step, in seconds.

    Attributes:
        rank: global rank.
        step: total.
        computing: computation, overlapped with communication or not.
        communicating: axis -> exposed communication after all its ranks have arrived.
        waiting: axis -> exposed waiting for ranks that have not arrived.
        hidden: axis -> communication overlapped with computation.
        waited_for: rank -> time this rank waited for it.
        queued: time in which the host ran other processes instead of this rank.
    """

    rank: int
    step: float
    computing: float = 0.0
    communicating: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited_for: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    queued: float = 0.0

    @property
    def rest(self) -> float:
        """Seconds in neither computation nor communication."""
        return max(0.0, self.step - self.computing - sum((*self.communicating.values(), *self.waiting.values())))


@dataclass(frozen=True)
class Wait:
    """One rank's wait in one communication, on the clock of rank 0.

    Attributes:
        call: the communication.
        start, stop: of the wait.
        complete: when the last of its ranks arrived.
        last: that rank.
    """

    call: Communication
    start: float
    stop: float
    complete: float
    last: int


def collect_waits(traces: Sequence[RankTrace]) -> dict[int, list[Wait]]:
    """Returns the waits of each rank; calls with the same axis, ranks, and number are one communication."""
    arrivals: dict[tuple, list[tuple[float, int]]] = defaultdict(list)
    for trace in traces:
        for call in trace.communications:
            arrivals[call.axis, call.ranks, call.number].append((call.start - trace.offset, trace.rank))
    waits_by_rank: dict[int, list[Wait]] = {}
    for trace in traces:
        waits = []
        for call in trace.communications:
            complete, last = max(arrivals[call.axis, call.ranks, call.number])
            waits += [
                Wait(call, start - trace.offset, stop - trace.offset, complete, last) for start, stop in call.waits
            ]
        waits_by_rank[trace.rank] = sorted(waits, key=lambda wait: wait.start)
    return waits_by_rank


def compute_shares(traces: Sequence[RankTrace]) -> list[TraceShares]:
    """Returns the breakdown of each rank's step."""
    waits, breakdowns = collect_waits(traces), []
    for trace in traces:
        shares = TraceShares(trace.rank, trace.stop - trace.start, queued=trace.queued)
        busy = _union((start - trace.offset, stop - trace.offset) for _, start, stop in trace.computed)
        shares.computing = sum(stop - start for start, stop in busy)
        # If two communications overlap, the first one counts.
        done = float("-inf")
        for wait in waits[trace.rank]:
            start = max(wait.start, done)
            done = max(done, wait.stop)
            if start >= wait.stop:
                continue
            middle = min(max(start, wait.complete), wait.stop)
            overlapped = _overlap((start, wait.stop), busy) if trace.overlaps else 0.0
            idle = middle - start - (_overlap((start, middle), busy) if trace.overlaps else 0.0)
            shares.hidden[wait.call.axis] += overlapped
            shares.waiting[wait.call.axis] += idle
            shares.communicating[wait.call.axis] += wait.stop - start - overlapped - idle
            if wait.last != trace.rank:
                shares.waited_for[wait.last] += idle
        breakdowns.append(shares)
    return breakdowns


def held_up(shares: Sequence[TraceShares]) -> tuple[int, float] | None:
    """Returns the rank that delayed the others most, and the delay as a share of a step; `None` if no rank did.

    A rank's own waits, and the time in which the host ran other processes, do not count as its delay.
    """
    delays = []
    for one in shares:
        caused = max((other.waited_for.get(one.rank, 0.0) for other in shares), default=0.0)
        delays.append(((caused - sum(one.waited_for.values()) - one.queued) / one.step, one.rank))
    share, rank = max(delays, default=(0.0, 0))
    return (rank, share) if share > 0 else None


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _overlap(span: Span, others: Sequence[Span]) -> float:
    """Returns how much of a span lies in others, which are sorted and disjoint."""
    place, total = max(bisect_left(others, (span[0], span[0])) - 1, 0), 0.0
    while place < len(others) and others[place][0] < span[1]:
        total += max(0.0, min(span[1], others[place][1]) - max(span[0], others[place][0]))
        place += 1
    return total


def as_table(shares: Sequence[TraceShares]) -> str:
    """Returns a table with a line per rank: milliseconds of the step, and the share of each kind of time."""
    axes = sorted({axis for one in shares for axis in (*one.communicating, *one.waiting)})
    titles = ["computing", *(name for axis in axes for name in (f"{axis}", f"{axis} waits")), "rest"]
    lines = [f"{'rank':>5} {'ms':>10} " + " ".join(f"{title:>10}" for title in titles) + "  waited most for"]
    for one in shares:
        parts = [one.computing, *(part for axis in axes for part in (one.communicating[axis], one.waiting[axis]))]
        cells = [f"{part / one.step:.1%}" for part in (*parts, one.rest)]
        last = max(one.waited_for, key=one.waited_for.__getitem__, default=None)
        who = "" if last is None else f"rank {last}, {one.waited_for[last] * 1e3:.1f} ms"
        lines.append(f"{one.rank:>5} {one.step * 1e3:>10.1f} " + " ".join(f"{cell:>10}" for cell in cells) + f"  {who}")
    total = sum(one.step for one in shares)
    hidden = {axis: sum(one.hidden[axis] for one in shares) / total for axis in axes}
    if any(hidden.values()):
        lines.append("overlapped with computation: " + ", ".join(f"{axis} {part:.1%}" for axis, part in hidden.items()))
    return "\n".join(lines)


def write_merged(traces: Sequence[RankTrace], path: str | os.PathLike[str]) -> None:
    """Writes one Chrome trace of all ranks for ui.perfetto.dev, with a process per rank."""
    beginning = min(trace.start - trace.offset for trace in traces)
    waits = collect_waits(traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        events += _names(trace.rank)
        for label, start, stop in trace.computed:
            events.append(_event(trace.rank, _COMPUTE, label, start - trace.offset - beginning, stop - start))
        for wait in waits[trace.rank]:
            events += _iter_wait_events(trace.rank, wait, beginning)
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"layout": traces[0].layout}}
    replace_file(Path(path), lambda partial: partial.write_text(json.dumps(content), encoding="utf-8"))


def _names(rank: int) -> Iterator[dict[str, Any]]:
    names: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"}),
        ("process_sort_index", 0, {"sort_index": rank}),
        ("thread_name", _COMPUTE, {"name": "computing"}),
        ("thread_name", _COMMUNICATION, {"name": "communication"}),
    ]
    yield from ({"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args} for name, thread, args in names)


def _event(rank: int, thread: int, name: str, start: float, seconds: float, **facts: Any) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"name": name, "cat": name.partition(" ")[0], "ph": "X", "pid": rank, "tid": thread, **times, "args": facts}


def _iter_wait_events(rank: int, wait: Wait, beginning: float) -> Iterator[dict[str, Any]]:
    call, middle = wait.call, min(max(wait.start, wait.complete), wait.stop)
    facts = {"ranks": list(call.ranks), "number": call.number}
    name = f"{call.axis} {call.operation}".strip()
    if middle > wait.start and wait.last != rank:
        who = f"{name}: waits for rank {wait.last}"
        yield _event(rank, _COMMUNICATION, who, wait.start - beginning, middle - wait.start, **facts)
    else:
        middle = wait.start
    if wait.stop > middle:
        yield _event(rank, _COMMUNICATION, name, middle - beginning, wait.stop - middle, **facts)
