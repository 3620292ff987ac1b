"""One picture of a plan: memory of each pipeline rank against the device's, and the simulated step."""

from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.paths import replace_file
from ..pipeline_parallel.simulation import simulate, simulated_timeline
from ..pipeline_parallel.stage_counts import stages_per_rank
from ..profile.timeline import draw_bars, require_plots
from .estimate import Estimate
from .search import SearchResult

_GIB = 2**30
# Kept from step to step, from dark to light, then what a step adds.
_COLOURS = {
    "weights": "#1f4e79",
    "main weights": "#2e75b6",
    "moments": "#6fa8dc",
    "gradients": "#9fc5e8",
    "gathered weights": "#cfe2f3",
    "activations": "#e69138",
    "at work": "#f9cb9c",
}
_WIDTH, _ROW = 16.0, 0.4
# Microbatches that are drawn of a step without stages.
_SHOWN = 8


def draw_plan(found: SearchResult, path: Path) -> None:
    """Draws the best layout into a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or no layout fits.
    """
    require_plots()
    if not found.best:
        raise ConfigError(f"{path} is not drawn: no layout fits.")
    from matplotlib.figure import Figure

    one = found.best[0]
    ranks = len(one.memory)
    height = 1.6 + 2 * _ROW * max(ranks, 3)
    figure = Figure(figsize=(_WIDTH, height), dpi=130, layout="constrained")
    memory, step = figure.subplots(2, 1)
    _draw_memory(memory, found, one)
    _draw_step(step, one)
    replace_file(path, lambda partial: figure.savefig(partial, format="png"))


def _draw_memory(axes: Any, found: SearchResult, one: Estimate) -> None:
    starts: Counter[int] = Counter()
    for name, colour in _COLOURS.items():
        sizes = [rank.get(name, 0) / _GIB for rank in one.memory]
        if any(sizes):
            places = range(len(sizes))
            axes.barh(places, sizes, 0.8, [starts[place] for place in places], color=colour, label=name)
            starts.update(dict(zip(places, sizes, strict=True)))
    job = found.job
    axes.axvline(job.device.memory_gib, color="#990000", label=f"{job.device.name}: {job.device.memory_gib:g} GiB")
    axes.axvline(job.memory / _GIB, color="#990000", linestyle=":", label=f"{job.memory_share:.0%} of it")
    axes.set_ylim(len(one.memory) - 0.5, -0.5)
    axes.set_yticks(range(len(one.memory)), [f"rank {rank}" for rank in range(len(one.memory))])
    axes.set_xlabel("GiB of one device at its fullest")
    axes.set_title(f"{one.layout.layout()}: memory of the pipeline's ranks", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _draw_step(axes: Any, one: Estimate) -> None:
    """Draws the schedule, with no more microbatches than show how it begins, goes on and ends."""
    layout = one.layout
    per_rank = stages_per_rank(layout)
    count = one.microbatches
    # A multiple of the ranks is right for every schedule.
    shown = min(count, 2 * layout.pp_size if layout.pp_size > 1 else _SHOWN)
    played = simulate(layout.pipeline_schedule, layout.pp_size, per_rank, shown, one.stages, one.send)
    timeline = simulated_timeline(played, layout.pipeline_schedule, shown)
    draw_bars(axes, timeline, _WIDTH)
    said = f"{shown} of {count} microbatches" if shown < count else f"{count} microbatches"
    share = one.bubble / one.seconds
    axes.set_title(f"the step as simulated: {one.seconds:.2f} s, bubble {share:.1%}; {said} drawn", fontsize=11)
