"""The picture of the losses."""

import os
from pathlib import Path
from typing import Any

from .training import curves

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def can_draw() -> bool:
    """Whether matplotlib, the extra `plots`, is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw_losses(log: tuple[Any, ...], path: str | os.PathLike[str]) -> None:
    """Draws training and evaluation losses by step as PNG.

    Args:
        log: as in `TrainerState.log_history`.
        path (`str` or `Path`): the file; written in place.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # The figure and its canvas only: pyplot keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (label, points) in enumerate(curves(log).items()):
        steps, losses = zip(*points, strict=True)
        marker = "o" if label != "training loss" or len(points) < 20 else None
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(steps, losses, label=label, marker=marker, markersize=3.5, linewidth=1.4, color=colour)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with Path(path).open("wb") as file:
        canvas.print_png(file)
