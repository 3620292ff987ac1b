"""Plot of the losses."""

import math
import os
from importlib.util import find_spec
from typing import Any

from .training import curves

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def can_draw(log: tuple[Any, ...]) -> bool:
    """Returns whether there are at least two finite losses, and matplotlib (the extra `plots`) is installed."""
    losses = [value for points in curves(log).values() for _, value in points if math.isfinite(value)]
    return len(losses) >= 2 and find_spec("matplotlib") is not None


def draw_losses(log: tuple[Any, ...], path: str | os.PathLike[str]) -> None:
    """Plots the training and evaluation losses of a `TrainerState.log_history` by step as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Avoid pyplot, which keeps global state and may look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
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
    figure.savefig(path, format="png")
