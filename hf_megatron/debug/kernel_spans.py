"""What an accelerator did in a step, from torch's profiler: its kernels, and those of NCCL by their groups."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .rank_trace import Communication, RankTrace

_NCCL = "ncclDevKernel"
_POINT_TO_POINT = ("send", "recv")


def device_profiler(device: torch.device) -> Any:
    """Makes a profiler of a device's kernels; NCCL's carry the names of their process groups."""
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, getattr(kinds, device.type.upper())])


def kernels_of(profiler: Any, trace: RankTrace) -> RankTrace:
    """Returns a trace with what the device did in the place of what the host saw of it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        return with_kernels(json.loads(path.read_text(encoding="utf-8")), trace)


def with_kernels(said: Mapping[str, Any], trace: RankTrace) -> RankTrace:
    """Returns a trace with the kernels of a Chrome trace of Kineto.

    A kernel of NCCL begins when this rank comes to it, and ends when all have.

    Args:
        said: the file's contents.
        trace: of the host, whose clock Kineto's is too.
    """
    base = said.get("baseTimeNanoseconds", 0) / 1e9
    groups = {group["pg_name"]: group for group in said.get("distributedInfo", {}).get("pg_config", ())}
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    computed, calls = [], []
    kernels = [event for event in said["traceEvents"] if event.get("cat") == "kernel"]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        start = base + event["ts"] / 1e6
        stop = start + event["dur"] / 1e6
        facts = event.get("args", {})
        if not event["name"].startswith(_NCCL):
            computed.append((_shortened(event["name"]), start, stop))
            continue
        group = groups.get(facts.get("Process Group Name"), {})
        operation = str(facts.get("Collective name", event["name"]))
        ranks = tuple(group.get("ranks", ()))
        if operation in _POINT_TO_POINT and "Src Rank" in facts and "Dst Rank" in facts:
            ranks = facts["Src Rank"], facts["Dst Rank"]
        axis = str(group.get("pg_desc", "")).removeprefix("mesh_")
        calls.append(Communication(axis, operation, ranks, counts[axis, ranks], start, [(start, stop)]))
        counts[axis, ranks] += 1
    ends = [trace.stop, *(stop for _, _, stop in computed), *(wait[1] for call in calls for wait in call.waits)]
    return replace(trace, computed=computed, communications=calls, stop=max(ends), overlaps=True)


def _shortened(name: str) -> str:
    """Returns a kernel's name without its template's arguments."""
    return name.partition("<")[0].partition("(")[0].removeprefix("void ")
