"""Plots of one pipeline step: PNG and a Perfetto trace, with the measured and the theoretical bubble."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..compat.ecosystem import require_plots
from ..core.io.safe_paths import replace_file
from ..core.spans import (
    COMMUNICATION,
    COMPUTE,
    NO_MICROBATCH,
    Span,
    SpanRecorder,
    Timeline,
    align,
    bubble_share,
    clock_offset,
)

# Name and colors of each span kind; computation gets darker from chunk to chunk.
_KINDS = {
    "F": ("forward", "#a8cdf0", "#6fa8dc", "#3d7fbf", "#235a91", "#143a61"),
    "B": ("backward", "#a9d8a4", "#76b971", "#4c964a", "#2f7031", "#1b4a1e"),
    "I": ("backward, input gradient", "#fbd38a", "#f0b24d", "#d98f1f", "#b06f0f", "#7d4e08"),
    "W": ("backward, weight gradient", "#d5b8e8", "#b48bd3", "#9161b8", "#6d4194", "#4a2a68"),
    "receive_forward": ("receive forward", "#9db4c8"),
    "send_forward": ("send forward", "#c9d6e2"),
    "receive_backward": ("receive backward", "#a9bda5"),
    "send_backward": ("send backward", "#d3dfd0"),
    "tied": ("tied embedding sum", "#e39fc2"),
    "optimizer": ("optimizer", "#5c5c5c"),
}


def gather_timeline(
    recorder: SpanRecorder,
    group: dist.ProcessGroup | None,
    *,
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
) -> Timeline:
    """Gathers the timeline of all ranks of a pipeline on every rank; all ranks of the group must call it.

    If the ranks are on several hosts (by hostname), their clocks are aligned first (`spans.clock_offset`).

    Args:
        recorder (`SpanRecorder`): spans of this rank.
        group (`ProcessGroup`): the ranks of the pipeline, in its order.
        schedule, ranks, stages_per_rank, microbatches: as in the pipeline's `describe()`. A small batch is split into
            fewer microbatches: the number of recorded ones counts.

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


class _Bar(NamedTuple):
    """A span as drawn in the plots."""

    span: Span
    rank: int
    start: float
    color: str
    ink: str
    thin: bool
    number: str


def _bars(timeline: Timeline) -> Iterator[_Bar]:
    beginning = timeline.start
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            _, color = get_name_and_color(span.kind, span.stage // timeline.ranks)
            red, green, blue = bytes.fromhex(color[1:])
            ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
            number = str(span.microbatch) if span.kind in COMPUTE and span.microbatch != NO_MICROBATCH else ""
            yield _Bar(span, rank, span.start - beginning, color, ink, span.kind in COMMUNICATION, number)


def get_name_and_color(kind: str, chunk: int) -> tuple[str, str]:
    name, *shades = _KINDS.get(kind, (kind, "#000000"))
    return name, shades[min(chunk, len(shades) - 1)]


def list_legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Returns name and color of every kind of span that occurs, computation first, with one entry per chunk."""
    span_kinds = dict.fromkeys((span.kind, span.stage // timeline.ranks) for row in timeline.spans for span in row)
    kinds = list(dict.fromkeys((*_KINDS, *(kind for kind, _ in span_kinds))))
    legend: dict[tuple[str, str], str] = {}
    for kind, chunk in sorted(span_kinds, key=lambda entry: (kinds.index(entry[0]), entry[1])):
        name, color = get_name_and_color(kind, chunk)
        several = kind in COMPUTE and timeline.stages > timeline.ranks
        legend.setdefault((kind, color), f"{name}, chunk {chunk}" if several else name)
    return [(name, color) for (_, color), name in legend.items()]


def to_perfetto(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes a Chrome trace for ui.perfetto.dev: a process per rank with threads for computation and communication."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        about = [("process_name", 0, {"name": f"rank {rank}"}), ("process_sort_index", 0, {"sort_index": rank})]
        about += [("thread_name", thread, {"name": name}) for thread, name in enumerate(("compute", "communication"))]
        events += [{"name": name, "ph": "M", "pid": rank, "tid": tid, "args": args} for name, tid, args in about]
    for bar in _bars(timeline):
        events.append(
            {
                "name": bar.span.kind + bar.number,
                "cat": bar.span.kind,
                "ph": "X",
                "pid": bar.rank,
                "tid": int(bar.thin),
                "ts": bar.start * 1e6,
                "dur": bar.span.duration * 1e6,
                "args": {"stage": bar.span.stage, "microbatch": bar.span.microbatch},
            }
        )
    facts = {name: getattr(timeline, name) for name in ("schedule", "ranks", "stages", "microbatches")}
    facts["bubble_share"] = bubble_share(timeline)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
    replace_file(Path(path), lambda partial: partial.write_text(json.dumps(trace), encoding="utf-8"))


def to_png(timeline: Timeline, path: str | os.PathLike[str], formula: float) -> None:
    """Draws the timeline with matplotlib.

    `formula` is the bubble share of the schedule with equal stages and free communication.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_plots()
    # Create only the figure: pyplot keeps global state and may look for a display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # Width in inches, such that 7-point digits fit into the shorter computations.
    width = min(max(14.0, 0.18 * _length(timeline)), 48.0)
    figure = Figure(figsize=(width, 1.9 + 0.62 * timeline.ranks), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    draw_bars(axes, timeline, width)
    axes.set_title(timeline.title(formula), fontsize=11)
    keys = [Patch(facecolor=color, label=name) for name, color in list_legend(timeline)]
    figure.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    replace_file(Path(path), lambda partial: figure.savefig(partial, format="png"))


def draw_bars(axes: Any, timeline: Timeline, width: float) -> None:
    """Draws a row per rank into matplotlib's `axes`, which are `width` inches wide."""
    # Width of a digit on the time axis, with the figure's margins estimated.
    digit = timeline.duration * 1e3 * 0.07 / (width - 1)
    for bar in _bars(timeline):
        start, duration = bar.start * 1e3, bar.span.duration * 1e3
        low, high = (bar.rank + 0.22, 0.2) if bar.thin else (bar.rank - 0.4, 0.62)
        # A white edge would hide communication thinner than the edge.
        edge = "none" if bar.thin else "white"
        axes.broken_barh([(start, duration)], (low, high), facecolor=bar.color, edgecolor=edge, linewidth=0.3)
        if bar.number and duration >= digit * len(bar.number):
            centre = (start + duration / 2, low + high / 2)
            axes.text(*centre, bar.number, ha="center", va="center", fontsize=7, color=bar.ink)
    axes.set_xlim(0, timeline.duration * 1e3)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_xlabel("milliseconds; numbers are microbatches, thin rows communication, white is idle")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)


def write_pictures(timeline: Timeline, directory: str | os.PathLike[str], name: str, formula: float) -> list[Path]:
    """Writes `name.png` and `name.json` into a directory, which is created if missing.

    Returns:
        `list[Path]`: the two files.

    Raises:
        ConfigError: matplotlib is not installed; nothing is written.
    """
    require_plots()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("png", "json")]
    to_png(timeline, paths[0], formula)
    to_perfetto(timeline, paths[1])
    return paths


def _length(timeline: Timeline) -> float:
    """Returns the step's length in units of a short computation, to size a plot so that microbatch numbers fit."""
    durations = sorted(span.duration for spans in timeline.spans for span in spans if span.kind in COMPUTE)
    return timeline.duration / max(durations[len(durations) // 4], 1e-9)
