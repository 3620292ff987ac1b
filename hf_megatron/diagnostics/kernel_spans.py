"""Device kernels of a step from torch's profiler, with NCCL kernels matched to the host's calls."""

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
# Kineto event categories that launch kernels.
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def device_profiler(device: torch.device) -> Any:
    """Returns a profiler of a device's kernels."""
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, getattr(kinds, device.type.upper())])


def get_kernel_trace(profiler: Any, trace: RankTrace) -> RankTrace:
    """Returns a trace with the profiled kernels in place of the times measured on the host."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        return with_kernels(json.loads(path.read_text(encoding="utf-8")), trace)


def with_kernels(chrome_trace: Mapping[str, Any], trace: RankTrace) -> RankTrace:
    """Returns a trace with the kernels of a Chrome trace written by Kineto.

    An NCCL kernel begins when this rank reaches it and ends when all ranks have. It is attributed to the last call that
    the host had begun before the launch: Kineto records only group names, which several axes may share, and nothing
    about batched sends and receives.

    Args:
        chrome_trace: contents of the Chrome trace.
        trace: of the host, on the same clock as Kineto.
    """
    base = chrome_trace.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in chrome_trace["traceEvents"] if "ts" in event and "dur" in event]
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
    """Returns the calls that launched the kernels `(launch time, start, stop)`, with their times on the device."""
    waiting = deque(sorted(calls, key=lambda call: call.start))
    launching_calls: list[Communication] = []
    last: list[Communication] = []
    for launched, start, stop in kernels:
        begun: list[Communication] = []
        while waiting and waiting[0].start <= launched:
            begun.append(waiting.popleft())
        if begun:
            # Batched sends and receives share one kernel. Earlier calls had no kernel: they went over the host.
            count = next((place for place, call in enumerate(reversed(begun)) if not _is_pair(call)), len(begun))
            last = [replace(call, start=start, waits=[]) for call in begun[-max(count, 1) :]]
            launching_calls += last
        for call in last:
            call.waits.append((start, stop))
    return launching_calls


def _is_pair(call: Communication) -> bool:
    return call.operation in _POINT_TO_POINT


def _shortened(name: str) -> str:
    """Returns a kernel's name without template arguments."""
    return name.partition("<")[0].partition("(")[0].removeprefix("void ")
