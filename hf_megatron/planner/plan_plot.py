"""Plots of a plan and of a dry run: memory of each pipeline rank against the device's, and the simulated step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compat.ecosystem import require_plots
from ..config import MegatronConfig
from ..core.io.safe_paths import replace_file
from ..diagnostics.timeline import draw_bars
from ..errors import ConfigError
from ..pipeline_parallel.layers_per_stage import stages_per_rank
from ..pipeline_parallel.schedule_simulator import simulate, simulated_timeline
from .estimate import Estimate
from .rank_memory import ACTIVATIONS, AT_WORK, DECODED, GATHERED
from .rank_predictions import PredictedRank
from .search import SearchResult

_GIB = 2**30
# Memory kept between steps from dark to light, then memory used within a step.
_COLOURS = {
    "weights": "#1f4e79",
    "main weights": "#2e75b6",
    "moments": "#6fa8dc",
    "gradients": "#9fc5e8",
    GATHERED: "#cfe2f3",
    DECODED: "#dbe9f5",
    ACTIVATIONS: "#e69138",
    AT_WORK: "#f9cb9c",
}
_OTHER = "#999999"
_WIDTH, _ROW = 16.0, 0.4
# Number of microbatches drawn for a step without stages.
_SHOWN = 8


def draw_plan(result: SearchResult, path: Path) -> None:
    """Draws the best layout into a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or no layout fits.
    """
    require_plots()
    if not result.best:
        raise ConfigError(f"{path} is not drawn: no layout fits.")
    from matplotlib.figure import Figure

    one, job = result.best[0], result.job
    ranks = len(one.memory)
    height = 1.6 + 2 * _ROW * max(ranks, 3)
    figure = Figure(figsize=(_WIDTH, height), dpi=130, layout="constrained")
    memory, step = figure.subplots(2, 1)
    limits = {f"{job.device.name}: {job.device.memory_gib:g} GiB": job.device.memory_gib}
    limits[f"{job.memory_share:.0%} of it"] = job.memory / _GIB
    _draw_memory(memory, one.layout.layout(), one.memory, limits)
    _draw_step(step, one)
    replace_file(path, lambda partial: figure.savefig(partial, format="png"))


def draw_predicted_ranks(
    ranks: Sequence[PredictedRank], layout: MegatronConfig, path: Path, device_gib: float | None = None
) -> None:
    """Draws the memory of a dry run's pipeline ranks into a PNG: kept memory, and what a step adds at its peak.

    Args:
        device_gib (`float`, *optional*): memory of a device, drawn as a limit.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 1.2 + _ROW * max(len(ranks), 3)), dpi=130, layout="constrained")
    rows = [Counter(rank.kept) + Counter({ACTIVATIONS: rank.peak.size - sum(rank.kept.values())}) for rank in ranks]
    limits = {} if device_gib is None else {f"a device: {device_gib:g} GiB": device_gib}
    _draw_memory(figure.subplots(), layout.layout(), rows, limits)
    replace_file(path, lambda partial: figure.savefig(partial, format="png"))


def _draw_memory(axes: Any, name: str, ranks: Sequence[Mapping[str, int]], limits: Mapping[str, float]) -> None:
    starts: Counter[int] = Counter()
    others = dict.fromkeys(category for rank in ranks for category in rank if category not in _COLOURS)
    for category, colour in {**_COLOURS, **dict.fromkeys(others, _OTHER)}.items():
        sizes = [rank.get(category, 0) / _GIB for rank in ranks]
        if any(sizes):
            places = range(len(sizes))
            axes.barh(places, sizes, 0.8, [starts[place] for place in places], color=colour, label=category)
            starts.update(dict(zip(places, sizes, strict=True)))
    for (label, limit), style in zip(limits.items(), ("-", ":"), strict=False):
        axes.axvline(limit, color="#990000", linestyle=style, label=label)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_xlabel("GiB of one device at its fullest")
    axes.set_title(f"{name}: memory of the pipeline's ranks", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _draw_step(axes: Any, one: Estimate) -> None:
    """Draws the schedule with enough microbatches to show warm-up, steady state, and cool-down."""
    layout = one.layout
    per_rank = stages_per_rank(layout)
    count = one.microbatches
    # A multiple of the pipeline size is valid for every schedule.
    num_shown = min(count, 2 * layout.pp_size if layout.pp_size > 1 else _SHOWN)
    played = simulate(layout.pipeline_schedule, layout.pp_size, per_rank, num_shown, one.stages, one.send)
    timeline = simulated_timeline(played, layout.pipeline_schedule, num_shown)
    draw_bars(axes, timeline, _WIDTH)
    shown = f"{num_shown} of {count} microbatches" if num_shown < count else f"{count} microbatches"
    fraction = one.bubble / one.seconds
    axes.set_title(f"the step as simulated: {one.seconds:.2f} s, bubble {fraction:.1%}; {shown} drawn", fontsize=11)
