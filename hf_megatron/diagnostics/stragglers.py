"""Detects slow ranks by the time of their own work, not by the time they wait.

A slow rank makes the others wait, so collectives take long on every rank except the slow one. On CPU ranks a sampling
thread records many times a second whether the main thread is in a collective, and if not, in which module and function.
On accelerators a short fixed workload is timed with device events. The times in a window of steps are compared with
those times on the other ranks of the pipeline stage; a rank that is slower in several consecutive windows is reported.
"""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..data_parallel.distributed_optimizer import sharded, stepping_optimizer
from ..errors import ConfigError
from ..parallel_state import parallel_state, unwrap_parallel_model
from .stack_sampler import ThreadSampler

# Windows kept for a rank that is alone in its stage, to compare later windows with.
_REMEMBERED = 50
# Minimum slowdown, as a share of a step.
_NOTICEABLE = 0.1
# Number and size of the matrix products of the probe; a few milliseconds on current accelerators.
_PROBE_PRODUCTS, _PROBE_SIZE = 20, 4096


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than expected.

    Attributes:
        rank: global rank.
        stage: pipeline stage, whose other ranks it is compared with.
        seconds: its own work per step; on an accelerator, the time of the probe.
        usual: median of the other ranks; if it is alone in its stage, of its earlier windows.
        place: module, function, and line with the largest difference; `""` on an accelerator.
        step: optimizer steps so far.
    """

    rank: int
    stage: int
    seconds: float
    usual: float
    place: str
    step: int

    def __str__(self) -> str:
        times = f"{self.seconds / self.usual:.2f} x " if self.usual else ""
        text = (
            f"after {self.step} steps: rank {self.rank} (stage {self.stage}) is slow: {times}the usual time of its "
            f"stage, {1e3 * self.seconds:.1f} ms per step instead of {1e3 * self.usual:.1f}"
        )
        return text + (f", most of it in {self.place}" if self.place else "")


@dataclass(frozen=True)
class StepWindow:
    """Times of a rank in a window, per step: seconds of its own work, in total and by place, and of the full step."""

    stage: int
    seconds: float
    places: Mapping[str, float]
    step_seconds: float = 0.0


class StragglerWatch:
    """Reports ranks that are slower than the others of their stage; create one on every rank.

        watch = StragglerWatch(model, optimizer)
        ...  # the usual loop; reports are printed on rank 0
        watch.reports

    Ranks exchange a few values at the end of each window.

    Args:
        model: parallelized.
        optimizer: of the model; prepared. Its steps are counted.
        steps (`int`, defaults to 20): of a window.
        windows (`int`, defaults to 3): consecutive windows in which a rank must be slow to be reported.
        factor (`float`, defaults to 1.25): slowdown relative to the usual time from which a rank counts as slow.
        interval (`float`, defaults to 0.02): seconds between two samples of the main thread.
        say (`Callable`, *optional*): called with each report on global rank 0; prints it by default.

    Raises:
        ConfigError: the model was not parallelized, the optimizer not prepared, or a value is out of range.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int = 20,
        windows: int = 3,
        factor: float = 1.25,
        interval: float = 0.02,
        say: Callable[[Straggler], None] | None = None,
    ):
        state, optimizer = parallel_state(model), stepping_optimizer(optimizer)
        if state is None or sharded(optimizer) is None:
            raise ConfigError(
                "StragglerWatch requires a model loaded with megatron_config= and an optimizer prepared by "
                "prepare_optimizer, Trainer or Accelerate."
            )
        for name, value, least in (("steps", steps, 1), ("windows", windows, 1)):
            if value < least:
                raise ConfigError(f"StragglerWatch({name}={value}): expected {least} or more.")
        if factor <= 1 or interval <= 0:
            raise ConfigError(
                f"StragglerWatch(factor={factor}, interval={interval}): expected factor > 1 and interval > 0."
            )
        self.steps = steps
        self.reports: list[Straggler] = []
        self._stage = state.mesh.pp_rank
        self._say = say or _print
        self._device = state.mesh.device
        self._done = 0
        self._ranks = SlowRanks(windows, factor)
        self._since = time.monotonic()
        self._sampler = None if self._device.type != "cpu" else ThreadSampler(unwrap_parallel_model(model), interval)
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def stop(self) -> None:
        """Stops the sampling thread and removes the hook."""
        self._hook.remove()
        if self._sampler is not None:
            self._sampler.stop()

    def _after_step(self, *args: Any) -> None:
        self._done += 1
        if self._done % self.steps == 0:
            self._end_window()

    def _end_window(self) -> None:
        now = time.monotonic()
        if self._sampler is None:
            window = StepWindow(self._stage, _probe(self._device), {})
        else:
            places = {place: seconds / self.steps for place, seconds in self._sampler.take().items()}
            window = StepWindow(self._stage, sum(places.values()), places, (now - self._since) / self.steps)
        windows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(windows, window)
        reports = self._ranks.judge(windows, self._done)
        self.reports += reports
        for report in reports if dist.get_rank() == 0 else ():
            self._say(report)
        self._since = time.monotonic()
        if self._sampler is not None:
            # Discard the samples taken while ranks exchanged their windows.
            self._sampler.take()


class SlowRanks:
    """Judges consecutive windows of steps.

    Args:
        windows, factor: as in `StragglerWatch`.
    """

    def __init__(self, windows: int, factor: float):
        self.windows, self.factor = windows, factor
        self._slow: Counter[int] = Counter()
        self._earlier: dict[int, deque[StepWindow]] = {}

    def judge(self, windows: Sequence[StepWindow], step: int) -> list[Straggler]:
        """Returns the ranks that have now been slow in `windows` consecutive windows.

        Args:
            windows: this window of every rank of the job.
            step (`int`): optimizer steps so far.
        """
        reports = []
        for rank, window in enumerate(windows):
            others = [other for place, other in enumerate(windows) if other.stage == window.stage and place != rank]
            earlier = self._earlier.setdefault(rank, deque(maxlen=_REMEMBERED))
            usual = statistics.median(other.seconds for other in others) if others else None
            if usual is None and len(earlier) >= self.windows:
                usual = statistics.median(before.seconds for before in earlier)
            is_slow = usual is not None and window.seconds > max(
                self.factor * usual, usual + _NOTICEABLE * window.step_seconds
            )
            if not is_slow:
                earlier.append(window)
            self._slow[rank] = self._slow[rank] + 1 if is_slow else 0
            if usual is not None and self._slow[rank] == self.windows:
                place = _largest_difference(window, others or earlier)
                reports.append(Straggler(rank, window.stage, window.seconds, usual, place, step))
        return reports


def _largest_difference(window: StepWindow, others: Iterable[StepWindow]) -> str:
    """Returns the place where a rank is slowest relative to the other ranks, or to its earlier windows."""

    compared = list(others)

    def more(place: str) -> float:
        usual = statistics.median([other.places.get(place, 0.0) for other in compared] or [0.0])
        return window.places[place] - usual

    return max(window.places, key=more, default="")


def _probe(device: torch.device) -> float:
    """Returns the seconds that a fixed workload, the same on all ranks, takes by device events."""
    one = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Exclude work launched before.
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(_PROBE_PRODUCTS):
        torch.mm(one, one)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def _print(report: Straggler) -> None:
    print(f"hf_megatron: {report}", flush=True)
