"""Comparison of the measured memory of a run's ranks with its plan."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import CONFIG_MAPPING

from ..config import MegatronConfig
from ..diagnostics.step_memory import MeasuredMemory
from .rank_predictions import PredictedRank, predict_ranks

_MIB = 2**20
PEAK = "peak of the step"
# Share of the peak below which a category is not listed, such as mask tables.
_SMALL = 1e-3


def plan_for(measured: MeasuredMemory) -> list[PredictedRank]:
    """Returns the plan for every pipeline rank with a run's layout, batch and model.

    Raises:
        RankError: the layout does not fit the model.
    """
    values = dict(measured.config)
    config = CONFIG_MAPPING[values.pop("model_type")].from_dict(values)
    config._attn_implementation = measured.attention
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in measured.layout.items()}
    layout = MegatronConfig.from_saved(fields)
    if layout.pp_size > 1:
        layout = replace(layout, num_microbatches=measured.microbatches)
    return predict_ranks(
        config,
        layout,
        measured.ranks,
        microbatch_size=measured.rows,
        sequence_length=measured.length,
        dtype=getattr(torch, measured.dtype),
        as_gloo=measured.device == "cpu",
    )


def memory_table(measured_ranks: Sequence[MeasuredMemory], planned: Sequence[PredictedRank] | None) -> str:
    """Returns a table of measured and planned MiB, and the difference, for each rank and category."""
    by_place = {} if planned is None else {one.pipeline_rank: one for one in planned}
    lines = [f"{'rank':>5}  {'MiB':32} {'measured':>12} {'planned':>12} {'difference':>11}"]
    for one in measured_ranks:
        plan = by_place.get(one.pipeline_rank)
        kept = {} if plan is None else plan.kept
        for name in dict.fromkeys([*one.kept, *kept]):
            measured, size = one.kept.get(name, 0), kept.get(name, 0)
            if max(measured, size) > _SMALL * one.peak:
                lines.append(_line(one.rank, name, measured, None if plan is None else size))
        lines.append(_line(one.rank, PEAK, one.peak, None if plan is None else plan.peak.size))
        for name, size in one.allocator.items():
            lines.append(_line(one.rank, f"allocator: {name}", size, None))
    fullest = max(measured_ranks, key=lambda one: one.peak)
    parts = sorted(fullest.at_peak.items(), key=lambda item: -item[1])
    lines.append(
        f"fullest: rank {fullest.rank}, " + ", ".join(f"{name} {size / _MIB:.1f}" for name, size in parts if size)
    )
    if fullest.layers:
        most = max(fullest.layers, key=fullest.layers.__getitem__)
        lines.append(f"a microbatch leaves most in {most}: {fullest.layers[most] / _MIB:.1f} MiB")
    return "\n".join(lines)


def _line(rank: int, name: str, measured: int, planned: int | None) -> str:
    cells = [f"{measured / _MIB:12.2f}"]
    if planned is not None:
        difference = f"{measured / planned - 1:+.1%}" if planned else ("" if not measured else "not planned")
        cells += [f"{planned / _MIB:12.2f}", f"{difference:>11}"]
    return f"{rank:>5}  {name:32} " + " ".join(cells)
