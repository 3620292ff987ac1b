"""What an accelerator did in a step, from torch's profiler: its kernels, those of NCCL by what the host had called."""

import json
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .rank_trace import Communication, RankTrace

_NCCL = "ncclDevKernel"
_POINT_TO_POINT = ("send", "recv")
# What of Kineto's events starts kernels.
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def device_profiler(device: torch.device) -> Any:
    """Makes a profiler of a device's kernels."""
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

    A kernel of NCCL begins when this rank comes to it, and ends when all have. Whose it is says the call that the host
    was in, or had left last, when it started the kernel: Kineto names groups, of which several axes may share one, and
    nothing of sends and receives that go together.

    Args:
        said: the file's contents.
        trace: of the host, whose clock Kineto's is too.
    """
    base = said.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in said["traceEvents"] if "ts" in event and "dur" in event]
    launches = {
        event["args"]["correlation"]: base + event["ts"] / 1e6
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    computed, of_nccl = [], []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        start = base + event["ts"] / 1e6
        stop = start + event["dur"] / 1e6
        if event["name"].startswith(_NCCL):
            of_nccl.append((launches.get(event["args"].get("correlation"), start), start, stop))
        else:
            computed.append((_shortened(event["name"]), start, stop))
    calls = _called(sorted(of_nccl), trace.communications)
    ends = [trace.stop, *(stop for _, _, stop in computed), *(wait[1] for call in calls for wait in call.waits)]
    return replace(trace, computed=computed, communications=calls, stop=max(ends), overlaps=True)


def _called(kernels: Sequence[tuple[float, float, float]], calls: Sequence[Communication]) -> list[Communication]:
    """Returns the calls that kernels `(when it was started, start, stop)` are of, with their times on the device."""
    waiting = deque(sorted(calls, key=lambda call: call.start))
    found: list[Communication] = []
    last: list[Communication] = []
    for launched, start, stop in kernels:
        begun: list[Communication] = []
        while waiting and waiting[0].start <= launched:
            begun.append(waiting.popleft())
        if begun:
            # Sends and receives that go together are one kernel; what is before them had none: it went over the host.
            count = next((place for place, call in enumerate(reversed(begun)) if not _is_pair(call)), len(begun))
            last = [replace(call, start=start, waits=[]) for call in begun[-max(count, 1) :]]
            found += last
        for call in last:
            call.waits.append((start, stop))
    return found


def _is_pair(call: Communication) -> bool:
    return call.operation in _POINT_TO_POINT


def _shortened(name: str) -> str:
    """Returns a kernel's name without its template's arguments."""
    return name.partition("<")[0].partition("(")[0].removeprefix("void ")
