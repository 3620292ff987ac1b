"""HTML report of a run: one self-contained file that can be read in ten seconds."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.io.safe_paths import replace_file
from .run_charts import Bar, line_chart, mesh_table, shares_chart, stacked_bars, step_picture
from .run_record import RunRecord
from .trace_breakdown import TraceShares, compute_shares, held_up

_TEMPLATE = Path(__file__).with_name("run_report.html")
# Logged name -> title and unit of its chart.
_CHARTS = {
    "loss": ("loss", ""),
    "eval_loss": ("evaluation loss", ""),
    "grad_norm": ("gradient norm", ""),
    "learning_rate": ("learning rate", ""),
    "tokens_per_second": ("tokens per second", ""),
    "mfu": ("MFU", "%"),
    "expert_load_of_ranks": ("busiest rank's tokens over the mean", ""),
}
_EXPERTS = "expert_load/"
_MIB, _GIB = 2**20, 2**30
# Thresholds of findings: memory relative to the plan, share of a step spent waiting, busiest expert relative to the
# mean, loss and tokens per second relative to their best.
_OVER_PLAN, _WAITING, _BUSY, _RISEN, _SLOWER = 1.1, 0.3, 4.0, 1.5, 0.9
# Number of slow-rank reports listed, and of ranks in the step chart.
_SHOWN, _DRAWN = 40, 16


def write_page(run: RunRecord, path: str | os.PathLike[str], planned: Mapping[int, int] | None = None) -> None:
    """Writes the report of a run.

    Args:
        run: its record.
        path: of the HTML file.
        planned (*optional*): pipeline rank -> planned peak memory of the recorded step, in bytes.
    """
    from jinja2 import Template

    shares = compute_shares(run.traces) if run.traces else []
    memory, legend = _memory(run, planned or {})
    drawn = _pick_chart_ranks(run.facts.places)
    template = Template(_TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
    page = template.render(
        facts=run.facts,
        subtitle=_subtitle(run),
        findings=_findings(run, shares, planned or {}),
        cards=_cards(run, shares),
        charts=[chart for name in _CHARTS if (chart := _chart(run, name))],
        shares=shares_chart(shares) if shares else "",
        picture=step_picture(run.traces, drawn) if shares else "",
        drawn=len(drawn),
        memory=memory,
        memory_legend=legend,
        planned=bool(planned),
        experts=_experts(run),
        mesh=mesh_table(run.facts.axes, run.facts.places, _noted(run)),
        stragglers=run.stragglers[-_SHOWN:],
        notes=run.notes,
        looked_at=_looked_at(run),
        versions=", ".join(f"{name} {version}" for name, version in run.facts.versions.items()),
        hosts=_hosts(run.facts.hosts),
    )
    replace_file(Path(path), lambda partial: partial.write_text(page, encoding="utf-8"))


def _looked_at(run: RunRecord) -> str:
    """Returns a list of the recorded data, shown when there are no findings."""
    losses = len(run.series("loss"))
    parts = [f"{losses} logged losses"] if losses else []
    parts += [f"a step's {name}" for name, there in (("trace", run.traces), ("memory", run.memory)) if there]
    return ", ".join(parts)


def _pick_chart_ranks(places: Sequence[Sequence[int]]) -> list[int]:
    """Returns the ranks in the step chart: the first rank of each pipeline stage, and others if all ranks fit."""
    firsts = {tuple(place[1:2]): rank for rank, place in reversed([*enumerate(places)])}
    stages = sorted(firsts.values())
    others = [rank for rank in range(len(places)) if rank not in stages]
    return sorted([*stages, *others][:_DRAWN]) if len(places) <= _DRAWN else stages[:_DRAWN]


def _subtitle(run: RunRecord) -> str:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.facts.started))
    size = run.facts.parameters
    parameters = f"{size / 1e9:.3g}B" if size >= 1e9 else f"{size / 1e6:.3g}M" if size >= 1e6 else f"{size / 1e3:.3g}k"
    steps = f"{run.logs[-1]['step']} steps" if run.logs else "no step logged"
    return f"{parameters} parameters, {run.facts.device}, started {started}, {steps}"


def _chart(run: RunRecord, name: str) -> str:
    series = run.series(name)
    if name == "mfu":
        series = [(step, 100 * value) for step, value in series]
    title, unit = _CHARTS[name]
    return line_chart(title, series, unit) if series else ""


def _cards(run: RunRecord, shares: Sequence[TraceShares]) -> list[tuple[str, str]]:
    cards = []
    for name, title, form in (
        ("loss", "loss", "{:.4g}"),
        ("tokens_per_second", "tokens per second", "{:,.0f}"),
        ("mfu", "MFU", "{:.1%}"),
        ("tflops_per_device", "TFLOP/s per device", "{:.4g}"),
    ):
        values = [value for _, value in run.series(name)]
        if values:
            # Use the median speed: the first steps of a run are slower.
            recent = values[-1] if name == "loss" else sorted(values)[len(values) // 2]
            cards.append((title, form.format(recent)))
    if shares:
        total = sum(one.step for one in shares)
        cards.append(("time of a step", f"{max(one.step for one in shares) * 1e3:.4g} ms"))
        cards.append(("of it waiting", f"{sum(sum(one.waiting.values()) for one in shares) / total:.0%}"))
    if run.memory:
        fullest = max(one.allocator.get("peak", one.peak) for one in run.memory)
        of_all = f" of {run.facts.device_bytes / _GIB:.0f}" if run.facts.device_bytes else ""
        size = f"{fullest / _GIB:.1f}{of_all} GiB" if fullest > _GIB else f"{fullest / _MIB:.1f} MiB"
        cards.append(("fullest rank", size))
    return cards


def _findings(run: RunRecord, shares: Sequence[TraceShares], planned: Mapping[int, int]) -> list[str]:
    findings = []
    losses = run.series("loss")
    for name, series in (("loss", losses), ("gradient norm", run.series("grad_norm"))):
        broken = [int(step) for step, value in series if not math.isfinite(value)]
        if broken:
            more = f" and {len(broken) - 1} more times" if len(broken) > 1 else ""
            findings.append(f"The {name} was not finite at step {broken[0]}{more}.")
    means = _tenths(losses)
    if means and means[-1] > _RISEN * min(means):
        findings.append(f"The loss has risen: {means[-1]:.4g} of late, {min(means):.4g} at its best.")
    speeds = _tenths(run.series("tokens_per_second"))
    if speeds and speeds[-1] < _SLOWER * max(speeds):
        findings.append(f"Slower than before: {speeds[-1]:,.0f} tokens per second of late, {max(speeds):,.0f} at best.")
    if run.skipped:
        more = f" and {len(run.skipped) - 1} more times" if len(run.skipped) > 1 else ""
        findings.append(f"Step {run.skipped[0]} was skipped{more}: gradients were not finite.")
    findings += [f"{text[:1].upper()}{text[1:]}." for text in run.stragglers[-3:]]
    slowest = held_up(shares)
    if slowest is not None and slowest[1] > _WAITING:
        findings.append(f"Others wait {slowest[1]:.0%} of a step for rank {slowest[0]}.")
    for one in run.memory:
        plan = planned.get(one.pipeline_rank)
        if plan is not None and one.peak > _OVER_PLAN * plan:
            findings.append(f"Rank {one.rank} holds {one.peak / plan - 1:.0%} more than planned at its fullest.")
    busy = _expert_loads(run)
    if busy and max(busy.values()) > _BUSY:
        layer = max(busy, key=busy.__getitem__)
        findings.append(f"The busiest expert of {layer} has {busy[layer]:.1f} times the mean of its layer's tokens.")
    return findings


def _tenths(series: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the median of each tenth of a series; empty if the series is too short."""
    values = [value for _, value in series if math.isfinite(value)]
    size = len(values) // 10
    parts = (sorted(values[start : start + size]) for start in range(0, 10 * size, size or 1))
    return [part[size // 2] for part in parts] if size >= 2 else []


def _memory(run: RunRecord, planned: Mapping[int, int]) -> tuple[str, list[tuple[str, str]]]:
    if not run.memory:
        return "", []
    names = list(
        dict.fromkeys(name for one in run.memory for name, size in one.at_peak.items() if size > one.peak / 1e3)
    )
    kinds = {name: f"m{min(number, 6)}" for number, name in enumerate(names)}
    bars = [
        Bar(
            f"rank {one.rank}",
            [(kinds[name], name, one.at_peak.get(name, 0) / _MIB) for name in names],
            planned[one.pipeline_rank] / _MIB if one.pipeline_rank in planned else None,
        )
        for one in run.memory
    ]
    return stacked_bars(bars, unit=" MiB", label="memory by rank"), [*kinds.items()]


def _expert_loads(run: RunRecord) -> dict[str, float]:
    last: dict[str, Any] = next((one for one in reversed(run.logs) if any(_EXPERTS in name for name in one)), {})
    return {name.removeprefix(_EXPERTS): value for name, value in last.items() if name.startswith(_EXPERTS)}


def _experts(run: RunRecord) -> str:
    loads = _expert_loads(run)
    if not loads:
        return ""
    bars = [
        Bar(f"layer {number}", [("m0", name, value)], None, f"{value:.2f}")
        for number, (name, value) in enumerate(loads.items())
    ]
    return stacked_bars(bars, unit=" x the mean", label="load of experts by layer")


def _noted(run: RunRecord) -> dict[int, str]:
    notes = {}
    for text in run.stragglers:
        number = text.partition("rank ")[2].partition(" ")[0]
        if number.isdigit():
            notes[int(number)] = "is slow"
    return notes


def _hosts(hosts: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    names = [f"{host} ({count} rank{'s' if count > 1 else ''})" for host, count in counts.items()]
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more hosts" if len(names) > 16 else "")
