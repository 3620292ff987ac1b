"""One pipeline step as a picture: PNG, HTML and a trace for Perfetto, with the bubble measured beside its formula."""

import html
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from .spans import COMMUNICATION, COMPUTE, NO_MICROBATCH, Span, SpanRecorder, align, clock_offset

# One row per kind of compute, darker from chunk to chunk.
_COMPUTE_COLOURS = {
    "F": ("#a8cdf0", "#6fa8dc", "#3d7fbf", "#235a91", "#143a61"),
    "B": ("#a9d8a4", "#76b971", "#4c964a", "#2f7031", "#1b4a1e"),
    "I": ("#fbd38a", "#f0b24d", "#d98f1f", "#b06f0f", "#7d4e08"),
    "W": ("#d5b8e8", "#b48bd3", "#9161b8", "#6d4194", "#4a2a68"),
}
_OTHER_COLOURS = {
    "receive_forward": "#9db4c8",
    "send_forward": "#c9d6e2",
    "receive_backward": "#a9bda5",
    "send_backward": "#d3dfd0",
    "tied": "#e39fc2",
    "optimizer": "#5c5c5c",
}
_UNKNOWN_COLOUR = "#000000"
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input gradient",
    "W": "backward, weight gradient",
    "receive_forward": "receive forward",
    "send_forward": "send forward",
    "receive_backward": "receive backward",
    "send_backward": "send backward",
    "tied": "tied embedding sum",
    "optimizer": "optimizer",
}

# Pixels of the HTML picture: a rank's compute row, the communication row below it, and what lies around them.
_COMPUTE_HEIGHT, _COMMUNICATION_HEIGHT, _GAP, _LEFT, _AXIS = 30, 10, 12, 64, 28
_LEAST_WIDTH, _MOST_WIDTH = 1100, 12000


@dataclass
class Timeline:
    """The spans of one step.

    Args:
        spans (`Sequence[Sequence[Span]]`): of each pipeline rank, on one clock.
        schedule (`str`): its name.
        ranks, stages, microbatches (`int`): pipeline ranks, stages of all ranks together, microbatches of the step.
    """

    spans: Sequence[Sequence[Span]]
    schedule: str
    ranks: int
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        if len(self.spans) != self.ranks:
            raise ConfigError(f"Timeline.ranks = {self.ranks}: got the spans of {len(self.spans)} ranks.")

    @property
    def start(self) -> float:
        """When the first span of any rank starts."""
        return min(span.start for spans in self.spans for span in spans)

    @property
    def duration(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return max(span.stop for spans in self.spans for span in spans) - self.start

    def title(self, formula: float) -> str:
        """Schedule, sizes, time of the step, and the measured bubble beside the formula's."""
        chunks = f" x {self.stages // self.ranks} stages" if self.stages > self.ranks else ""
        return (
            f"{self.schedule}, pp {self.ranks}{chunks}, {self.microbatches} microbatches: step "
            f"{_milliseconds(self.duration)}, bubble measured {bubble_share(self):.1%}, formula {formula:.1%}"
        )


def gather_timeline(
    recorder: SpanRecorder,
    group: dist.ProcessGroup | None,
    *,
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
) -> Timeline:
    """The timeline of all ranks of a pipeline, on each of them; every rank of the group must call it.

    Ranks of several hosts, told by their names, have their clocks aligned first (`spans.clock_offset`).

    Args:
        recorder (`SpanRecorder`): what this rank recorded.
        group (`ProcessGroup`): the ranks of the pipeline, in its order.
        schedule, ranks, stages_per_rank, microbatches: what the pipeline's `describe()` says. A batch with few rows is
            cut into fewer microbatches: those that were recorded count.

    Raises:
        ConfigError: the group has another number of ranks than the pipeline.
    """
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group)
    spans = recorder.spans
    if len(set(hosts)) > 1:
        spans = align(spans, clock_offset(group))
    gathered: list[Any] = [None] * len(hosts)
    dist.all_gather_object(gathered, spans, group)
    recorded = {span.microbatch for spans in gathered for span in spans if span.kind in COMPUTE}
    return Timeline(gathered, schedule, ranks, ranks * stages_per_rank, len(recorded) or microbatches)


def bubble_share(timeline: Timeline) -> float:
    """The share of the ranks' time, from the first computation to the last, in which they did not compute.

    Waiting for neighbours counts as bubble, and so does everything else between two computations.

    Raises:
        ConfigError: nothing was computed while the recorder was on.
    """
    compute = [span for spans in timeline.spans for span in spans if span.kind in COMPUTE]
    if not compute:
        raise ConfigError("The timeline has no forward or backward span: the recorder was not on during a step.")
    window = max(span.stop for span in compute) - min(span.start for span in compute)
    return 1 - sum(span.duration for span in compute) / (timeline.ranks * window)


def to_perfetto(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes a Chrome trace for ui.perfetto.dev: a process per rank, computing and communication as its threads.

    Args:
        timeline (`Timeline`): what to write.
        path (`str` or `Path`): the file; it appears when it is complete.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        for thread, name in enumerate(("compute", "communication")):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
        for span in spans:
            events.append(
                {
                    "name": _label(span) if span.kind in COMPUTE else span.kind,
                    "cat": span.kind,
                    "ph": "X",
                    "pid": rank,
                    "tid": int(span.kind in COMMUNICATION),
                    "ts": (span.start - timeline.start) * 1e6,
                    "dur": span.duration * 1e6,
                    "args": {"stage": span.stage, "microbatch": span.microbatch},
                }
            )
    facts = {
        "schedule": timeline.schedule,
        "ranks": timeline.ranks,
        "stages": timeline.stages,
        "microbatches": timeline.microbatches,
        "bubble_share": bubble_share(timeline),
    }
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
    _write(path, lambda partial: partial.write_text(json.dumps(trace), encoding="utf-8"))


def to_html(timeline: Timeline, path: str | os.PathLike[str], formula: float) -> None:
    """Writes one HTML file that needs nothing else: the picture, what each span was under the mouse, and the bubbles.

    Args:
        timeline (`Timeline`): what to draw.
        path (`str` or `Path`): the file; it appears when it is complete.
        formula (`float`): the bubble share that the schedule has with equal stages and free communication.
    """
    measured = bubble_share(timeline)
    width = min(max(_LEAST_WIDTH, 18 * _length(timeline)), _MOST_WIDTH)
    scale = width / timeline.duration
    row = _COMPUTE_HEIGHT + _COMMUNICATION_HEIGHT + _GAP
    height = timeline.ranks * row

    drawing = []
    for seconds in _ticks(timeline.duration, int(width // 110)):
        x = _LEFT + seconds * scale
        drawing.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        drawing.append(f'<text class="axis" x="{x:.1f}" y="{height + 16}">{_milliseconds(seconds)}</text>')
    for rank, spans in enumerate(timeline.spans):
        top = rank * row + _GAP / 2
        drawing.append(f'<text class="rank" x="4" y="{top + _COMPUTE_HEIGHT / 2 + 4:.1f}">rank {rank}</text>')
        for span in spans:
            communicates = span.kind in COMMUNICATION
            x = _LEFT + (span.start - timeline.start) * scale
            y = top + _COMPUTE_HEIGHT * communicates
            size = _COMMUNICATION_HEIGHT if communicates else _COMPUTE_HEIGHT
            kind = ' class="thin"' if communicates else ""
            drawing.append(
                f'<rect{kind} x="{x:.2f}" y="{y:.1f}" width="{max(span.duration * scale, 0.3):.2f}" height="{size}" '
                f'fill="{_colour(span, timeline.ranks)}"><title>{html.escape(_description(span, timeline))}</title>'
                "</rect>"
            )
            if span.kind in COMPUTE and span.duration * scale >= 6.5 * len(str(span.microbatch)) + 2:
                ink = "white" if _is_dark(_colour(span, timeline.ranks)) else "black"
                x += span.duration * scale / 2
                drawing.append(f'<text x="{x:.1f}" y="{y + size / 2 + 4:.1f}" fill="{ink}">{span.microbatch}</text>')
    legend = "\n".join(
        f'<span class="key"><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for name, colour in _legend(timeline)
    )
    title = html.escape(timeline.title(formula))
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 20px; background: white; color: black; }}
h1 {{ font-size: 17px; }}
.picture {{ overflow-x: auto; }}
svg text {{ font: 11px sans-serif; text-anchor: middle; pointer-events: none; }}
svg text.rank {{ text-anchor: start; font-size: 13px; }}
svg text.axis {{ fill: #555; }}
svg line {{ stroke: #ddd; }}
svg rect {{ stroke: white; stroke-width: 0.5; }}
svg rect.thin {{ stroke: none; }}
svg rect:hover {{ stroke: black; }}
.key {{ display: inline-block; margin: 6px 16px 0 0; }}
.key i {{ display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Share of the ranks' time without computation: measured <b>{measured:.1%}</b>, formula <b>{formula:.1%}</b> (equal
stages, communication for nothing). Numbers are microbatches; the thin row below a rank's is its communication; white is
idle.</p>
<div class="picture">
<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width + 40:.0f}" height="{height + _AXIS}">
{chr(10).join(drawing)}
</svg>
</div>
<p>{legend}</p>
</body>
</html>
"""
    _write(path, lambda partial: partial.write_text(page, encoding="utf-8"))


def require_plots() -> None:
    """Raises `ConfigError`, with the command that installs it, where matplotlib is absent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError('PNG pictures need matplotlib: pip install "hf_megatron[plots]"') from None


def to_png(timeline: Timeline, path: str | os.PathLike[str], formula: float) -> None:
    """Draws the timeline with matplotlib.

    Args:
        timeline (`Timeline`): what to draw.
        path (`str` or `Path`): the file; it appears when it is complete.
        formula (`float`): the bubble share that the schedule has with equal stages and free communication.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_plots()
    # The figure and its canvas only: pyplot keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    title = timeline.title(formula)
    # Inches; 7 points of digits in the shorter computations.
    width = min(max(14.0, 0.18 * _length(timeline)), 48.0)
    figure = Figure(figsize=(width, 1.9 + 0.62 * timeline.ranks), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # What a digit takes of the axis, with the figure's margins estimated.
    digit = timeline.duration * 1e3 * 0.07 / (width - 1)
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            start, duration = (span.start - timeline.start) * 1e3, span.duration * 1e3
            colour = _colour(span, timeline.ranks)
            communicates = span.kind in COMMUNICATION
            low, high = (rank + 0.22, 0.2) if communicates else (rank - 0.4, 0.62)
            # An edge would hide a communication that is thinner than it.
            edge = "none" if communicates else "white"
            axes.broken_barh([(start, duration)], (low, high), facecolor=colour, edgecolor=edge, linewidth=0.3)
            if span.kind in COMPUTE and duration >= digit * len(str(span.microbatch)):
                axes.text(
                    start + duration / 2,
                    low + high / 2,
                    str(span.microbatch),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if _is_dark(colour) else "black",
                )
    axes.set_xlim(0, timeline.duration * 1e3)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_xlabel("milliseconds; numbers are microbatches, thin rows communication, white is idle")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    keys = [Patch(facecolor=colour, label=name) for name, colour in _legend(timeline)]
    figure.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    _write(path, lambda partial: canvas.print_png(str(partial)))


def write_pictures(timeline: Timeline, directory: str | os.PathLike[str], name: str, formula: float) -> list[Path]:
    """Writes `name.png`, `name.html` and `name.json` into a directory, which is made where it is missing.

    Args:
        timeline (`Timeline`): what to draw.
        directory (`str` or `Path`), name (`str`): where.
        formula (`float`): the bubble share that the schedule has with equal stages and free communication.

    Returns:
        `list[Path]`: the three files.

    Raises:
        ConfigError: matplotlib is not installed; nothing is written.
    """
    require_plots()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("png", "html", "json")]
    to_png(timeline, paths[0], formula)
    to_html(timeline, paths[1], formula)
    to_perfetto(timeline, paths[2])
    return paths


def _write(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """The file appears under its name when it is complete; what was there before stays until then."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        write(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _colour(span: Span, ranks: int) -> str:
    if span.kind in COMPUTE:
        shades = _COMPUTE_COLOURS[span.kind]
        return shades[min(span.stage // ranks, len(shades) - 1)]
    return _OTHER_COLOURS.get(span.kind, _UNKNOWN_COLOUR)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _legend(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Name and colour of everything that occurs, computing first and a line per chunk."""
    chunks = timeline.stages // timeline.ranks
    spans = {(span.kind, span.stage // timeline.ranks): span for row in timeline.spans for span in row}
    for kind in dict.fromkeys((*COMPUTE, *COMMUNICATION, *_NAMES, *(kind for kind, _ in spans))):
        seen: set[str] = set()
        for chunk in sorted(chunk for other, chunk in spans if other == kind):
            colour = _colour(spans[kind, chunk], timeline.ranks)
            name = _NAMES.get(kind, kind) + (f", chunk {chunk}" if kind in COMPUTE and chunks > 1 else "")
            if colour not in seen:
                seen.add(colour)
                yield name, colour


def _length(timeline: Timeline) -> float:
    """The step's length in computations of the shorter kind: what a picture needs to show their numbers."""
    durations = sorted(span.duration for spans in timeline.spans for span in spans if span.kind in COMPUTE)
    return timeline.duration / max(durations[len(durations) // 4], 1e-9)


def _label(span: Span) -> str:
    return span.kind if span.microbatch == NO_MICROBATCH else f"{span.kind}{span.microbatch}"


def _description(span: Span, timeline: Timeline) -> str:
    microbatch = "" if span.microbatch == NO_MICROBATCH else f", microbatch {span.microbatch}"
    return (
        f"{_NAMES.get(span.kind, span.kind)}, stage {span.stage}{microbatch}: {_milliseconds(span.duration)} from "
        f"{_milliseconds(span.start - timeline.start)}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _ticks(duration: float, most: int) -> list[float]:
    """Round numbers from 0 on, at most so many."""
    step = 1e-9
    while duration / step > most:
        for factor in (1, 2, 5, 10):
            if duration / (step * factor) <= most:
                return [index * step * factor for index in range(int(duration / (step * factor)) + 1)]
        step *= 10
    return [0.0]
