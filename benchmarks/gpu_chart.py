"""Chart of a report of `gpu.py`: a step's time, its kernels and its host, by row."""

COLORS = {"step": "#8c959f", "kernels": "#0969da", "host": "#bf8700"}


def collect_bars(report):
    """Returns (row, milliseconds of a step, of its kernels, of the host) of the rows that were measured."""
    bars = []
    for row in report["rows"]:
        if row["error"] or row["kind"] not in ("step", "optimizer"):
            continue
        host = sum(row["host_ms"].values())
        bars.append((row["id"], row["step_ms"]["median"], row["kernel_ms"], host))
    return bars


def draw_chart(report, path):
    """Draws the chart to a file; its name's ending chooses the format."""
    from matplotlib.figure import Figure

    bars = collect_bars(report)
    figure = Figure(figsize=(9, 1.5 + 0.5 * len(bars)), layout="constrained")
    axes = figure.subplots()
    height = 0.27
    for place, kind in enumerate(COLORS):
        # A CPU has no kernel times.
        if all(bar[1 + place] is None for bar in bars):
            continue
        values = [bar[1 + place] or 0 for bar in bars]
        label = {"step": "step", "kernels": "sum of its kernels", "host": "host, without the device's backlog"}[kind]
        offsets = [number + (place - 1) * height for number in range(len(bars))]
        axes.barh(offsets, values, height, color=COLORS[kind], label=label)
    axes.set_yticks(range(len(bars)), [bar[0] for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.set_title(f"{report['gpu'].get('name', '')}: training steps of one rank, communication not included")
    axes.legend()
    figure.savefig(path)
