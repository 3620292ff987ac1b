"""Spans of real time per rank: what was computed or waited for, for which stage and microbatch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError

# Forward, full backward, and its two halves where a schedule splits it: gradient of the input and of the weights.
COMPUTE = ("F", "B", "I", "W")
# Waiting for a neighbour, the data parallel reduction, and the sum over the two ends of a tied embedding.
COMMUNICATION = ("receive_forward", "send_forward", "receive_backward", "send_backward", "tied")
# Spans of no microbatch, such as the optimizer's.
NO_MICROBATCH = -1

_ALIGN_ROUNDS = 9


@dataclass(frozen=True)
class Span:
    """One thing a rank did.

    Args:
        kind (`str`): one of `COMPUTE`, `COMMUNICATION` or `"optimizer"`.
        stage (`int`): the pipeline stage, counted over all ranks; the chunk is `stage // ranks`.
        microbatch (`int`): from 0; `NO_MICROBATCH` for what belongs to none.
        start, stop (`float`): seconds of `time.time()`, one clock for the ranks of one host. Clocks of several hosts
            differ by more than a span lasts; `align` makes them one.
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
        synchronize (`Callable`, *optional*): called before either time is taken. A GPU computes after the call that
            started it has returned, so its spans need the device's `synchronize`; the run then loses the overlap of
            computing, communication and launching that it has unrecorded, and takes longer.
    """

    def __init__(self, synchronize: Callable[[], Any] | None = None) -> None:
        self.synchronize = synchronize
        self._spans: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        """What was recorded since the last `clear`, in the order in which it ended."""
        return tuple(self._spans)

    def record(self, kind: str, stage: int, microbatch: int = NO_MICROBATCH) -> "_Recording":
        """Records the block of a `with` statement as a span; an exception in it leaves none."""
        return _Recording(self, kind, stage, microbatch)

    def clear(self) -> None:
        """Forgets all spans."""
        self._spans.clear()

    def _now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return time.time()


class _Recording:
    """A class rather than a generator: a third of its cost, and it runs several times per microbatch."""

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
    """Seconds by which this rank's clock is ahead of the group's first rank; every rank of the group must call it.

    All ranks read their clocks as they leave a barrier, several times, and the median counts. It is as exact as ranks
    leave a barrier together: some tenths of a millisecond.
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
    """Moves spans to the clock of the rank that `clock_offset` compared with."""
    return tuple(replace(span, start=span.start - offset, stop=span.stop - offset) for span in spans)


@dataclass
class Timeline:
    """The spans of one step.

    Args:
        spans (`Sequence[Sequence[Span]]`): of each pipeline rank, on one clock.
        schedule (`str`): its name.
        ranks, stages, microbatches (`int`): pipeline ranks, stages of all ranks together, microbatches of the step.
    """

    spans: Sequence[Sequence[Span]]
    schedule: str
    ranks: int
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        if len(self.spans) != self.ranks:
            raise ConfigError(f"Timeline.ranks = {self.ranks}: got the spans of {len(self.spans)} ranks.")

    @property
    def start(self) -> float:
        """Returns when the first span of any rank starts."""
        return min(span.start for spans in self.spans for span in spans)

    @property
    def duration(self) -> float:
        """Returns the seconds from the first span's start to the last one's end."""
        return max(span.stop for spans in self.spans for span in spans) - self.start

    def title(self, formula: float) -> str:
        """Names schedule, sizes, time of the step, and the measured bubble beside the formula's."""
        chunks = f" x {self.stages // self.ranks} stages" if self.stages > self.ranks else ""
        return (
            f"{self.schedule}, pp {self.ranks}{chunks}, {self.microbatches} microbatches: step "
            f"{_milliseconds(self.duration)}, bubble measured {bubble_share(self):.1%}, formula {formula:.1%}"
        )


def bubble_share(timeline: Timeline) -> float:
    """Returns the share of the ranks' time, from the first computation to the last, in which they did not compute.

    Waiting for neighbours counts as bubble, and so does everything else between two computations.

    Raises:
        ConfigError: nothing was computed while the recorder was on.
    """
    compute = [span for spans in timeline.spans for span in spans if span.kind in COMPUTE]
    if not compute:
        raise ConfigError("The timeline has no forward or backward span: the recorder was not on during a step.")
    window = max(span.stop for span in compute) - min(span.start for span in compute)
    return 1 - sum(span.duration for span in compute) / (timeline.ranks * window)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
