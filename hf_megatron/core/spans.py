"""Per-rank time spans of computation and communication, with pipeline stage and microbatch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError

# Forward, full backward, and the two halves of a split backward: input gradient and weight gradient.
COMPUTE = ("F", "B", "I", "W")
# Waiting for a neighboring stage, and the all-reduce between the two ends of a tied embedding.
COMMUNICATION = ("receive_forward", "send_forward", "receive_backward", "send_backward", "tied")
# Microbatch of spans outside any microbatch, such as the optimizer's.
NO_MICROBATCH = -1

_ALIGN_ROUNDS = 9


@dataclass(frozen=True)
class Span:
    """Time span of one operation on a rank.

    Args:
        kind (`str`): one of `COMPUTE`, `COMMUNICATION` or `"optimizer"`.
        stage (`int`): the pipeline stage, counted over all ranks; the chunk is `stage // ranks`.
        microbatch (`int`): index of the microbatch; `NO_MICROBATCH` for spans outside any microbatch.
        start, stop (`float`): seconds of `time.time()`, one clock for the ranks of one host. Clocks of several hosts
            differ by more than a span lasts; `align` corrects them.
    """

    kind: str
    stage: int
    microbatch: int
    start: float
    stop: float

    @property
    def duration(self) -> float:
        return self.stop - self.start


class SpanRecorder:
    """Collects the spans of this rank.

        with recorder.record("F", stage=0, microbatch=3):
            ...

    Args:
        synchronize (`Callable`, *optional*): called before each timestamp. GPU work continues after the launching call
            has returned, so GPU spans need the device's `synchronize`; a recorded run then loses the overlap of
            computation, communication and kernel launches, and takes longer.
    """

    def __init__(self, synchronize: Callable[[], Any] | None = None) -> None:
        self.synchronize = synchronize
        self._spans: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans recorded since the last `clear`, in the order of their ends."""
        return tuple(self._spans)

    def record(self, kind: str, stage: int, microbatch: int = NO_MICROBATCH) -> "_Recording":
        """Records the block of a `with` statement as a span; nothing is recorded if the block raises."""
        return _Recording(self, kind, stage, microbatch)

    def clear(self) -> None:
        """Removes all spans."""
        self._spans.clear()

    def _now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.time()


class _Recording:
    """Context manager of `SpanRecorder.record`.

    It is a class rather than a generator because it runs several times per microbatch, at a third of a generator's
    cost.
    """

    __slots__ = ("kind", "microbatch", "recorder", "stage", "start")

    def __init__(self, recorder: SpanRecorder, kind: str, stage: int, microbatch: int) -> None:
        self.recorder, self.kind, self.stage, self.microbatch = recorder, kind, stage, microbatch

    def __enter__(self) -> None:
        self.start = self.recorder._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            stop = self.recorder._now()
            self.recorder._spans.append(Span(self.kind, self.stage, self.microbatch, self.start, stop))


def clock_offset(group: dist.ProcessGroup | None = None) -> float:
    """Returns the seconds by which this rank's clock is ahead of the group's first rank; collective over the group.

    All ranks read their clocks several times after a barrier, and the median difference counts. The error is the time
    between ranks' exits from a barrier: some tenths of a millisecond.
    """
    differences = []
    for _ in range(_ALIGN_ROUNDS):
        dist.barrier(group)
        now = time.time()
        times: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(times, now, group)
        differences.append(now - times[0])
    return statistics.median(differences)


def align(spans: tuple[Span, ...], offset: float) -> tuple[Span, ...]:
    """Shifts spans to the clock of the rank that `clock_offset` compared with."""
    return tuple(replace(span, start=span.start - offset, stop=span.stop - offset) for span in spans)


@dataclass
class Timeline:
    """Spans of one step on all pipeline ranks.

    Args:
        spans (`Sequence[Sequence[Span]]`): the spans of each pipeline rank, on one clock.
        schedule (`str`): name of the pipeline schedule.
        ranks, stages, microbatches (`int`): numbers of pipeline ranks, of stages over all ranks, and of microbatches
            per step.
    """

    spans: Sequence[Sequence[Span]]
    schedule: str
    ranks: int
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        if len(self.spans) != self.ranks:
            raise ConfigError(f"Timeline.ranks = {self.ranks}: got spans of {len(self.spans)} ranks.")

    @property
    def start(self) -> float:
        """Start time of the first span on any rank."""
        return min(span.start for spans in self.spans for span in spans)

    @property
    def duration(self) -> float:
        """Seconds from the start of the first span to the end of the last one."""
        return max(span.stop for spans in self.spans for span in spans) - self.start

    def title(self, formula: float) -> str:
        """Returns a title with the schedule, sizes, step time, and measured and theoretical bubble."""
        chunks = f" x {self.stages // self.ranks} stages" if self.stages > self.ranks else ""
        return (
            f"{self.schedule}, pp {self.ranks}{chunks}, {self.microbatches} microbatches: step "
            f"{_milliseconds(self.duration)}, bubble measured {bubble_share(self):.1%}, formula {formula:.1%}"
        )


def bubble_share(timeline: Timeline) -> float:
    """Returns the fraction of the ranks' time, between the first and the last computation, that is not computation.

    Everything between computations counts as bubble, including waiting for neighboring stages.

    Raises:
        ConfigError: the recorder was off during all computations.
    """
    compute = [span for spans in timeline.spans for span in spans if span.kind in COMPUTE]
    if not compute:
        raise ConfigError("The timeline has no forward or backward span. Keep the recorder on during a step.")
    window = max(span.stop for span in compute) - min(span.start for span in compute)
    return 1 - sum(span.duration for span in compute) / (timeline.ranks * window)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
