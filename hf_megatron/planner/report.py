"""Predicted ranks as text and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..config import MegatronConfig
from ..diagnostics.step_stats import HostRead
from ..pipeline_parallel.schedules import Action, Kind
from .rank_predictions import PredictedRank

_GIB = 2**30
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.SEND_FORWARD: "send",
    Kind.RECEIVE_FORWARD: "receive",
    Kind.SEND_BACKWARD: "send of gradients",
    Kind.RECEIVE_BACKWARD: "receive of gradients",
}


def as_rows(ranks: Iterable[PredictedRank]) -> list[dict[str, Any]]:
    """Returns predicted ranks as JSON-compatible values; sizes are bytes."""
    return [
        {
            "pipeline_rank": rank.pipeline_rank,
            "kind": rank.kind,
            "parameters": rank.parameters,
            "kept": rank.kept,
            "peak": rank.peak.size,
            "peak_at": _moment(rank.peak.action),
            "collectives": {
                f"{group} {operation}": {"calls": calls, "bytes": size}
                for (group, operation), (calls, size) in rank.collectives.items()
            },
            "waits": [_place(read) for read in rank.reads],
        }
        for rank in ranks
    ]


def as_text(ranks: Sequence[PredictedRank], layout: MegatronConfig, device_gib: float | None = None) -> str:
    """Returns a table of the kinds of ranks, with the collectives and host reads of the fullest rank.

    Args:
        device_gib (`float`, *optional*): memory of a device, to compare peaks with.
    """
    by_kind = {kind: [rank for rank in ranks if rank.kind == kind] for kind in dict.fromkeys(r.kind for r in ranks)}
    lines = [f"{layout.layout()}: {len(ranks)} pipeline ranks of {len(by_kind)} kinds, GiB of one rank"]
    names = list(
        dict.fromkeys(name for rank in ranks for name, size in rank.kept.items() if size > rank.peak.size / 1e3)
    )
    lines.append(_line("pipeline ranks", ["parameters", *names, "peak", "when"]))
    for same in by_kind.values():
        # Show the fullest: ranks of a kind hold the same layers, but differ in their in-flight microbatches.
        rank = max(same, key=lambda found: found.peak.size)
        kept = [f"{rank.kept.get(name, 0) / _GIB:.2f}" for name in names]
        cells = [f"{rank.parameters / 1e9:.3f}e9", *kept, f"{rank.peak.size / _GIB:.2f}", _moment(rank.peak.action)]
        lines.append(_line(_numbers([entry.pipeline_rank for entry in same]), cells))
    fullest = max(ranks, key=lambda found: found.peak.size)
    if device_gib is not None:
        judgment = "fits" if fullest.peak.size <= device_gib * _GIB else "does not fit"
        lines.append(f"{judgment} in {device_gib:g} GiB, without the memory of NCCL, cuBLAS and the allocator")
    lines.append(f"\npipeline rank {fullest.pipeline_rank} communicates in a step, in GiB of the largest tensors")
    for (group, operation), (calls, size) in sorted(fullest.collectives.items(), key=lambda item: -item[1][1]):
        lines.append(f"  {group.removeprefix('mesh_'):18} {operation:28} {calls:7} calls {size / _GIB:10.3f}")
    waits = dict.fromkeys(map(_place, fullest.reads))
    lines.append(f"its host waits for the device in {len(waits)} places")
    return "\n".join([*lines, *(f"  {wait}" for wait in waits)])


def _line(first: str, others: Iterable[str]) -> str:
    return f"{first:16}" + " ".join(f"{value:>16}" for value in others)


def _numbers(ranks: Sequence[int]) -> str:
    """Formats ascending integers as ranges."""
    spelled, start = [], ranks[0]
    for number, following in zip(ranks, [*ranks[1:], None], strict=True):
        if following != number + 1:
            spelled.append(f"{start}" if start == number else f"{start}-{number}")
            start = following if following is not None else start
    return ",".join(spelled)


def _moment(action: Action | None) -> str:
    if action is None:
        return "around the step"
    return f"{_WORDS[action.kind]} of stage {action.stage}, microbatch {action.microbatch}"


def _place(read: HostRead) -> str:
    return f"{read.moment}: {read.operation} in {read.where[0] if read.where else 'torch'}"
