"""SVG charts of a run, for a page whose style sheet defines their colors."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .rank_trace import RankTrace
from .trace_breakdown import TraceShares, collect_waits

# Maximum number of points in a line; longer series are drawn as the mean and range of groups of steps.
_POINTS = 240
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 170, 56, 22
# Larger numbers are written with an exponent.
_LARGEST = 1e15
# Maximum number of ranks in a chart, and the narrowest span in the step chart, in pixels.
_RANKS, _NARROWEST = 64, 0.4


class _Point(NamedTuple):
    step: float
    mean: float
    low: float
    high: float


def line_chart(title: str, series: Sequence[tuple[float, float]], unit: str = "") -> str:
    """Draws a value over the steps, and marks steps with a non-finite value.

    Args:
        series: (step, value).
    """
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    broken = [step for step, value in series if not math.isfinite(value)]
    if not finite:
        return ""
    points = _thinned(finite)
    first, last = series[0][0], series[-1][0]
    low, high = _limits(points)

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(last - first, 1e-12) * (_WIDTH - _LEFT - 20)

    def y(value: float) -> float:
        return 8 + (high - min(max(value, low), high)) / max(high - low, 1e-12) * (_HEIGHT - _BOTTOM - 8)

    parts = [f'<figure class="chart"><figcaption>{escape(title)} <b>{_short(finite[-1][1])}{unit}</b></figcaption>']
    parts.append(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} over steps">')
    for value in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y(value) + 4:.1f}">{_short(value)}</text>')
    for step in _ticks(first, last):
        parts.append(f'<text class="middle" x="{x(step):.1f}" y="{_HEIGHT - 6}">{_short(step)}</text>')
    if any(point.low != point.high for point in points):
        band = [f"{x(p.step):.1f},{y(p.high):.1f}" for p in points]
        band += [f"{x(p.step):.1f},{y(p.low):.1f}" for p in reversed(points)]
        parts.append(f'<polygon class="band" points="{" ".join(band)}"/>')
    line = " ".join(f"{x(point.step):.1f},{y(point.mean):.1f}" for point in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    if len(points) == 1:
        parts.append(f'<circle class="dot" cx="{x(points[0].step):.1f}" cy="{y(points[0].mean):.1f}" r="3"/>')
    for step in broken[:_POINTS]:
        parts.append(
            f'<line class="broken" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="8" y2="{_HEIGHT - _BOTTOM}">'
            f"<title>step {step:g}: not finite</title></line>"
        )
    return "".join([*parts, "</svg></figure>"])


def _thinned(series: Sequence[tuple[float, float]]) -> list[_Point]:
    size = max(1, math.ceil(len(series) / _POINTS))
    points = []
    for start in range(0, len(series), size):
        values = [value for _, value in series[start : start + size]]
        step = series[min(start + size // 2, len(series) - 1)][0]
        points.append(_Point(step, sum(values) / len(values), min(values), max(values)))
    return points


def _limits(points: Sequence[_Point]) -> tuple[float, float]:
    """Returns the drawn range: excludes the few largest and smallest values, which would flatten the rest."""
    lows, highs = sorted(point.low for point in points), sorted(point.high for point in points)
    cut = len(points) // 50
    low, high = lows[cut], highs[-1 - cut]
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Returns two to five round numbers."""
    span = high - low
    if span <= 0:
        return [low]
    rough = 10.0 ** math.floor(math.log10(span / 4))
    step = next(rough * factor for factor in (1, 2, 5, 10) if span / (rough * factor) <= 5)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    if abs(value) >= _LARGEST:
        return f"{value:.1e}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}"


class Bar(NamedTuple):
    """A rank's bar in a stacked chart: its label, (CSS class, name, size) of each segment, a mark, and a note."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    mark: float | None = None
    note: str = ""


def stacked_bars(bars: Sequence[Bar], *, unit: str, label: str) -> str:
    """Draws a bar per rank; if there are too many, draws the first ones and adds a caption."""
    shown = bars[:_RANKS]
    high = max(max(sum(size for _, _, size in bar.parts), bar.mark or 0.0) for bar in shown) or 1.0
    row = 20 if len(shown) <= 16 else 9
    height, left, right = len(shown) * row + 4, 64, 130 if any(bar.note for bar in shown) else 8
    scale = (940 - left - right) / high
    parts = [f'<svg viewBox="0 0 940 {height}" role="img" aria-label="{escape(label)}">']
    for number, bar in enumerate(shown):
        top, x = number * row + 1, float(left)
        if row > 12 or number % 8 == 0:
            parts.append(f'<text class="end" x="{left - 6}" y="{top + row / 2 + 3:.1f}">{escape(bar.label)}</text>')
        for kind, name, size in bar.parts:
            width = size * scale
            if width >= _NARROWEST:
                title = f"{bar.label}: {name} {_short(size)}{unit}"
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{row - 2}">'
                    f"<title>{escape(title)}</title></rect>"
                )
            x += width
        if bar.mark is not None:
            at = left + bar.mark * scale
            title = f"{bar.label}: planned {_short(bar.mark)}{unit}"
            parts.append(
                f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 1}" y2="{top + row - 1}">'
                f"<title>{escape(title)}</title></line>"
            )
        if bar.note and row > 12:
            parts.append(f'<text x="{940 - right + 6}" y="{top + row / 2 + 3:.1f}">{escape(bar.note)}</text>')
    parts.append("</svg>")
    more = f"<p>The first {_RANKS} of {len(bars)} ranks.</p>" if len(bars) > _RANKS else ""
    return "".join(parts) + more


def shares_chart(shares: Sequence[TraceShares]) -> str:
    """Draws the time shares of each rank in the traced step."""
    bars = []
    for one in shares:
        parts = [("compute", "computing", one.computing * 1e3)]
        for kind, name, sizes in (
            ("communicate", "communicating", one.communicating),
            ("wait", "waiting", one.waiting),
        ):
            parts += [(kind, f"{name} along {axis}", sizes[axis] * 1e3) for axis in sorted(sizes)]
        last = max(one.waited_for, key=one.waited_for.__getitem__, default=None)
        note = "" if last is None or one.waited_for[last] < 0.05 * one.step else f"waits for rank {last}"
        bars.append(Bar(f"rank {one.rank}", [*parts, ("rest", "the rest", one.rest * 1e3)], None, note))
    return stacked_bars(bars, unit=" ms", label="time of a step by rank")


def step_picture(traces: Sequence[RankTrace], ranks: Sequence[int]) -> str:
    """Draws the traced step of `ranks` over time; all traces are needed to find the ranks that these waited for."""
    shown = [trace for trace in traces if trace.rank in ranks]
    beginning = min(trace.start - trace.offset for trace in shown)
    duration = max(trace.stop - trace.offset for trace in shown) - beginning
    row, left = 22, 64
    scale = (940 - left - 8) / duration
    height = len(shown) * row + _BOTTOM
    waits = collect_waits(traces)
    parts = [f'<svg viewBox="0 0 940 {height}" role="img" aria-label="a step by rank and time">']
    for seconds in _ticks(0.0, duration * 1e3):
        at = left + seconds / 1e3 * scale
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - _BOTTOM}"/>')
        parts.append(f'<text class="middle" x="{at:.1f}" y="{height - 6}">{_short(seconds)} ms</text>')
    for number, trace in enumerate(shown):
        top = number * row + 2
        parts.append(f'<text class="end" x="{left - 6}" y="{top + 13}">rank {trace.rank}</text>')
        spans = [(label, start - trace.offset, stop - trace.offset) for label, start, stop in trace.computed]
        for label, start, stop in _joined(spans, _NARROWEST / scale):
            parts.append(
                _span(_get_kind(label), label, left + (start - beginning) * scale, (stop - start) * scale, top)
            )
        for wait in waits[trace.rank]:
            x, width = left + (wait.start - beginning) * scale, (wait.stop - wait.start) * scale
            if width >= _NARROWEST:
                middle = min(max(wait.complete - wait.start, 0.0) * scale, width) if wait.last != trace.rank else 0.0
                name = f"{wait.call.axis} {wait.call.operation}"
                if middle >= _NARROWEST:
                    parts.append(_span("wait", f"{name}: waits for rank {wait.last}", x, middle, top))
                if width - middle >= _NARROWEST:
                    parts.append(_span("communicate", name, x + middle, width - middle, top))
    return "".join([*parts, "</svg>"])


def _joined(spans: Sequence[tuple[str, float, float]], gap: float) -> list[tuple[str, float, float]]:
    """Merges adjacent spans of one kind with gaps too small to draw."""
    merged: list[tuple[str, float, float]] = []
    for label, start, stop in spans:
        kind = _get_kind(label)
        if merged and start - merged[-1][2] <= gap and (_get_kind(merged[-1][0]) == kind):
            same = merged[-1][0] == label
            merged[-1] = (label if same else label.partition(" ")[0], merged[-1][1], stop)
        else:
            merged.append((label, start, stop))
    return [span for span in merged if span[2] - span[1] >= gap]


def _get_kind(label: str) -> str:
    first = label.partition(" ")[0]
    return first if first in ("forward", "backward", "optimizer") else "compute"


def _span(kind: str, title: str, x: float, width: float, top: float) -> str:
    box = f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="18">'
    return f"{box}<title>{escape(title)}</title></rect>"


def mesh_table(axes: Mapping[str, int], places: Sequence[Sequence[int]], notes: Mapping[int, str]) -> str:
    """Returns a table of the mesh: pipeline stages as rows, replicas as columns, tp and cp ranks in a cell.

    Args:
        places: for each rank, its coordinates on dp, pp, cp and tp.
        notes: rank -> note shown with it.
    """
    cells: dict[tuple[int, int], list[int]] = {}
    for rank, (dp, pp, *_) in enumerate(places):
        cells.setdefault((pp, dp), []).append(rank)
    replicas = range(axes["dp"])
    head = "".join(f"<th>dp {dp}</th>" for dp in replicas)
    rows = []
    for pp in range(axes["pp"]):
        columns = []
        for dp in replicas:
            boxes = []
            for rank in cells.get((pp, dp), []):
                note = notes.get(rank)
                title = escape(f"rank {rank}: dp {dp}, pp {pp}, cp {places[rank][2]}, tp {places[rank][3]}")
                said = f" {escape(note)}" if note else ""
                boxes.append(f'<span class="rank{" bad" if note else ""}" title="{title}{said}">{rank}</span>')
            columns.append(f"<td>{''.join(boxes)}</td>")
        rows.append(f"<tr><th>pp {pp}</th>{''.join(columns)}</tr>")
    return f'<table class="mesh"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
