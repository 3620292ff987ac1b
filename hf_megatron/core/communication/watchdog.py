"""RankWatchdog: reports a failing rank's traceback on the other ranks, and identifies ranks that stopped responding.

Every rank runs one daemon thread with its own client of the job's store. Once a second it writes a heartbeat (a
counter, the number of optimizer steps and the location of the main thread) and checks for failure reports of other
ranks. It uses no process group, so it works while all of them hang.

    a rank raises             it writes its traceback to the store and exits immediately
    the others' collectives   raise (gloo) or hang (NCCL); these ranks read the report, print it and exit
    no report                 prints the rank whose heartbeat stopped, and the operation in which this rank waited
"""

import atexit
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...compat.torch_distributed import default_store, set_group_timeouts
from ...errors import RankError
from .call_stack import describe_location, find_waited_ranks, operation, traceback_frames, user_call
from .diverged_calls import BLOCKED_SECONDS, describe_diverged_calls
from .flight_recorder import record_path, write_flight_record

# Seconds between heartbeats; a rank is silent after missing two.
INTERVAL = 1.0
# Timeout in seconds for store requests; a store on a stopped rank never replies.
_STORE_SECONDS = 3.0
# Seconds that the main thread has to end after another rank failed (NCCL would wait for its own timeout), and that the
# watchdog thread has to return from the store at process exit.
_GRACE_SECONDS = 10.0


def _after(steps: int) -> str:
    return f"after {steps} optimizer step{'' if steps == 1 else 's'}"


def _lost_operation(error: BaseException, trace: TracebackType | None) -> str | None:
    """Describes the collective that an error, or the error that it was raised from, was raised in, if any."""
    frames, cause = traceback_frames(trace), error.__cause__
    if isinstance(error, RuntimeError):
        return operation(frames)
    if isinstance(cause, RuntimeError):
        # Both stacks contain the function that caught the cause.
        inner = traceback_frames(cause.__traceback__)
        return None if operation(inner) is None else operation([*inner, *frames[1:]])
    return None


@dataclass
class Stall:
    """Time for which the main thread has not moved.

    Attributes:
        stack: its stack, by code object and instruction.
        since: when the stack was first seen.
        early_beats: other ranks' heartbeats after 60 % of the timeout; unchanged ones later mean silent ranks.
        is_reported: whether the missing ranks were printed.
        frame: innermost frame of a stack that has not changed for two heartbeats, and when it was first seen.
    """

    stack: tuple[Any, ...] = ()
    since: float = field(default_factory=time.monotonic)
    early_beats: dict[int, dict[str, Any]] | None = None
    is_reported: bool = False
    frame: FrameType | None = None
    frame_since: float = 0.0


class RankWatchdog(threading.Thread):
    """Heartbeats and failure reports of this rank; started by `watch_ranks`.

    Args:
        store (`dist.Store`): a client of the job's store for exclusive use.
        timeout (`float`): seconds that a collective may take.
        store_host (`int`, *optional*): rank whose process hosts the store; by default a launcher hosts it.
        records (`Path`, *optional*): directory for the flight records of ranks that hang.
    """

    def __init__(self, store: dist.Store, timeout: float, store_host: int | None, records: Path | None = None):
        super().__init__(name="hf_megatron rank watch", daemon=True)
        self.timeout = timeout
        self.group = dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.steps = 0
        self._store, self._store_host, self._records = store, store_host, records
        self._process = os.getpid()
        self._requests: queue.Queue[tuple[Callable[[], Any], Future]] = queue.Queue()
        self._stopped = self._leaving = False
        self._beats = 0
        # Report of the rank that failed first, and when this rank read it.
        self._first: dict[str, Any] | None = None
        self._first_seen_at = 0.0
        self._silent: list[int] = []
        self._stall = Stall()

    def start(self) -> None:
        """Installs the hooks and starts the thread."""
        self._previous = sys.excepthook, threading.excepthook
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        self._step_hook = register_optimizer_step_post_hook(self._count_step)
        atexit.register(self._on_exit)
        super().start()

    def stop(self) -> None:
        """Stops the thread and restores the hooks that are still the watchdog's."""
        self._stopped = True
        self._step_hook.remove()
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous[0]
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous[1]
        if threading.current_thread() is not self:
            self._requests.put((lambda: None, Future()))
            self.join(_GRACE_SECONDS)

    def _count_step(self, *args: Any) -> None:
        self.steps += 1

    # The watchdog thread

    def run(self) -> None:
        following = 0.0
        while not self._stopped:
            try:
                if time.monotonic() >= following:
                    self._beat()
                    following = time.monotonic() + INTERVAL
                request, answer = self._requests.get(timeout=max(0.01, following - time.monotonic()))
            except queue.Empty:
                continue
            except dist.DistError:
                # The store is gone, so heartbeats cannot be read either; `_ask` raises for a rank that fails later.
                return
            try:
                answer.set_result(request())
            except dist.DistError as error:
                answer.set_exception(error)
                return

    def _beat(self) -> None:
        if self._first is not None:
            # Another rank has failed; the store may be gone. Ranks in different calls cannot end by themselves.
            grace = 0.0 if self._first.get("is_diverged") else _GRACE_SECONDS
            if not self._leaving and time.monotonic() - self._first_seen_at > grace:
                self._leaving = True
                self._say(self._describe_cause(self._first, None))
                self._leave(1)
            return
        self._beats += 1
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
        waits = operation(frames)
        stack = (self.steps, *((each.f_code, each.f_lasti) for each in frames))
        beat: dict[str, Any] = {
            "beat": self._beats,
            "steps": self.steps,
            "time": time.strftime("%H:%M:%S"),
            "waits": waits,
            "at": waits or describe_location(frames),
            "blocked_seconds": 0.0 if waits is None else self._count_blocked_seconds(stack, frames[0]),
            "waited_ranks": None if waits is None else find_waited_ranks(frames),
            "call": user_call(frames),
        }
        self._store.set(f"beat/{self.rank}", json.dumps(beat))
        self._look_for_failure()
        if not self._leaving:
            self._look_for_stall(stack, waits)
            if self._first is None and beat["blocked_seconds"] > BLOCKED_SECONDS:
                self._look_for_diverged_calls(beat)

    def _look_for_failure(self) -> None:
        if self._store.check(["first"]):
            self._first = self._read_first()
            self._first_seen_at = time.monotonic()
        elif self._store_host is not None and self._store.check([f"ended/{self._store_host}"]):
            # When a store ends before its clients, torch prints a C++ stack trace in each of them.
            self._store.set(f"seen/{self.rank}", "")
            self._stopped = True

    def _count_blocked_seconds(self, stack: tuple[Any, ...], frame: FrameType) -> float:
        """Returns for how long the main thread has been in one call of a collective."""
        stall, now = self._stall, time.monotonic()
        # A loop repeats its stack, but each call has its own frame. Keep the frame, and thereby the call's tensors,
        # only once the stack stays the same.
        if stack != stall.stack or now - stall.since < 2 * INTERVAL:
            return 0.0
        if stall.frame is not frame:
            stall.frame, stall.frame_since = frame, now
        return now - stall.frame_since

    def _look_for_diverged_calls(self, beat: dict[str, Any]) -> None:
        """Ends the job if its ranks wait for each other in different calls; the lowest running rank looks for it."""
        if self.rank and not self._store.check([f"ended/{rank}" for rank in range(self.rank)]):
            return
        beats = {self.rank: beat, **self._read_beats()}
        if len(beats) < self.world_size:
            return
        text = describe_diverged_calls(beats, self._read_names("ended"))
        if text is not None:
            error = f"{RankError.__module__}.{RankError.__name__}: {text}"
            report = {"rank": self.rank, "steps": self.steps, "error": error, "traceback": "", "cause": text}
            report["is_diverged"] = True
            self._leaving = True
            self._say(self._describe_cause(self._report(report), None))
            self._leave(1)

    def _look_for_stall(self, stack: tuple[Any, ...], waits: str | None) -> None:
        """Prints the missing ranks shortly before the timeout: NCCL's own watchdog kills the process directly."""
        now = time.monotonic()
        stall = self._stall
        if stack != stall.stack:
            self._stall = Stall(stack, now)
        elif stall.early_beats is None and now - stall.since > 0.6 * self.timeout:
            stall.early_beats = self._read_beats()
        elif stall.early_beats is not None and not stall.is_reported and now - stall.since > 0.85 * self.timeout:
            stall.is_reported = True
            self._write_record(waits)
            beats = self._read_beats()
            silent = [rank for rank, beat in beats.items() if beat == stall.early_beats.get(rank)]
            if waits or silent:
                where = waits or stack[1][0].co_name
                missing_report = self._missing(silent, beats, self._read_names("ended"))
                self._say(f"rank {self.rank} has waited {now - stall.since:.0f} s in {where}. {missing_report}")

    def _write_record(self, waits: str | None) -> None:
        """Writes this rank's flight record while it still shows the hanging collective."""
        if self._records is None:
            return
        try:
            path = write_flight_record(self._records, self.steps, waits)
        except OSError as error:
            self._say(f"rank {self.rank}: could not write the flight record: {error}")
            return
        if path is not None:
            self._say(
                f"rank {self.rank} hangs. Flight record: {path}; analyze all ranks with: hf-megatron debug hang "
                f"{self._records}"
            )

    def _read_beats(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(self._store.get(f"beat/{rank}")) for rank in self._read_names("beat")}

    def _read_names(self, kind: str) -> list[int]:
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if self._store.check([f"{kind}/{rank}"])]

    # Exit of a rank

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Returns the result of a request run by the watchdog thread; `ConnectionError` if the store does not reply.

        Only the watchdog thread uses the store: a request to a stopped host never returns.
        """
        answer: Future = Future()
        self._requests.put((request, answer))
        deadline = time.monotonic() + _STORE_SECONDS
        while True:
            try:
                return answer.result(0.1)
            except FutureTimeout:
                if not self.is_alive() or time.monotonic() > deadline:
                    raise ConnectionError from None
            except dist.DistError:
                raise ConnectionError from None

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show = partial(self._previous[0], kind, error, trace)
        if os.getpid() != self._process or self._stopped or self.group is not dist.group.WORLD:
            show()
        else:
            self._fail(error, trace, show)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        mine = os.getpid() == self._process and not self._stopped and self.group is dist.group.WORLD
        show = partial(self._previous[1], args)
        # A thread that dies outside a collective does not end the rank; in a collective it would leave the other ranks
        # waiting.
        if mine and args.exc_value is not None and operation(traceback_frames(args.exc_traceback)) is not None:
            self._fail(args.exc_value, args.exc_traceback, show)
        else:
            show()

    def _fail(self, error: BaseException, trace: TracebackType | None, show: Callable[[], Any]) -> None:
        """Reports or explains an error that ends this rank, and exits.

        `show` prints the full traceback; it is skipped if another rank failed first with the same error, or caused
        this one.
        """
        self._leaving = True
        # A collective usually raises because another rank failed.
        waits = _lost_operation(error, trace)
        report = {
            "rank": self.rank,
            "steps": self.steps,
            "error": traceback.format_exception_only(type(error), error)[-1].strip(),
            "traceback": "".join(traceback.format_exception(type(error), error, trace)),
            "cause": None,
        }
        try:
            if waits is not None:
                self._explain(report, waits, show)
            else:
                self._tell(report, show)
        except ConnectionError:
            show()
            where = f"was waiting in {waits}" if waits else f"failed: {report['error']}"
            self._say(
                f"rank {self.rank} {where} {_after(self.steps)}. The job's store does not answer: its host process "
                "(rank 0 or the launcher) has exited or is stopped."
            )
            if self._first is not None:
                self._say(self._describe_cause(self._first, waits))
        self._leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _explain(self, report: dict[str, Any], waits: str, show: Callable[[], Any]) -> None:
        """Prints the reason why a collective of this rank raised."""
        first, report["cause"] = self._cause()
        # Print before reporting: launchers terminate the other ranks as soon as one has failed.
        if first is not None:
            # Nothing is left to report, and the store may have ended with the rank that failed first.
            self._say(self._describe_cause(first, waits))
        else:
            show()
            self._say(f"rank {self.rank} was waiting in {waits} {_after(self.steps)}. {report['cause']}")
            self._ask(lambda: self._report(report))

    def _tell(self, report: dict[str, Any], show: Callable[[], Any]) -> None:
        """Reports an error of this rank to the other ranks."""
        first = self._ask(lambda: self._report(report))
        if first["rank"] != self.rank and first["error"] == report["error"]:
            self._say(f"rank {self.rank} failed like rank {first['rank']}: {report['error']}")
            return
        show()
        self._say(f"rank {self.rank} failed {_after(self.steps)}: {report['error']}\nThe other ranks are notified.")
        if first["rank"] != self.rank:
            self._say(self._describe_cause(first, None))

    def _report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Stores the report; returns the report of the rank that failed first."""
        self._store.set(f"failed/{self.rank}", "")
        return json.loads(self._store.compare_set("first", "", json.dumps(report)))

    def _read_first(self) -> dict[str, Any]:
        """Returns the report of the rank that failed first, whose process may wait until the others have read it."""
        first: dict[str, Any] = json.loads(self._store.get("first"))
        self._store.set(f"seen/{self.rank}", "")
        return first

    def _cause(self) -> tuple[dict[str, Any] | None, str | None]:
        """Finds the reason why a collective raised: the first failure's report, or else the missing ranks."""
        if self._first is not None:
            return self._first, None
        early, deadline = self._ask(self._read_beats), time.monotonic() + 2.5 * INTERVAL
        while time.monotonic() < deadline:
            # The watchdog thread may have read it before the store ended.
            if self._first is not None:
                return self._first, None
            if self._ask(lambda: self._store.check(["first"])):
                return self._ask(self._read_first), None
            time.sleep(0.05)
        beats, ended = self._ask(self._read_beats), self._ask(lambda: self._read_names("ended"))
        self._silent = [rank for rank, beat in beats.items() if beat == early.get(rank) and rank not in ended]
        return None, self._missing(self._silent, beats, ended)

    def _missing(self, silent: list[int], beats: dict[int, dict[str, Any]], ended: list[int]) -> str:
        """Describes each rank that has not reached the operation in which this rank waits."""
        lines = [f"Rank {r} has ended: its script finished or left early, {_after(beats[r]['steps'])}." for r in ended]
        for rank in silent:
            if rank not in ended:
                beat = beats[rank]
                lines.append(
                    f"Rank {rank} has gone silent (killed or stopped): last heartbeat {beat['time']}, "
                    f"{_after(beat['steps'])}, in {beat['at']}."
                )
        if not lines:
            for rank, beat in beats.items():
                verb = "waits in" if beat["waits"] else "has not reached it and is in"
                lines.append(f"Rank {rank} {verb} {beat['at']}, {_after(beat['steps'])}.")
        return " ".join(lines)

    def _describe_cause(self, first: dict[str, Any], waits: str | None) -> str:
        where = f"It was waiting in {waits}.\n" if waits else ""
        if first["cause"]:
            what = f"{first['cause']} Rank {first['rank']} detected this first, {_after(first['steps'])}."
            return f"rank {self.rank} ends, {_after(self.steps)}. {where}{what}"
        return (
            f"rank {self.rank} ends because rank {first['rank']} failed first, {_after(first['steps'])}: "
            f"{first['error']}\n{where}Rank {first['rank']}: {first['traceback']}"
        )

    def _say(self, text: str) -> None:
        print(f"hf_megatron: {text}", file=sys.stderr, flush=True)

    def _leave(self, status: int) -> None:
        """Exits without running the destructors of process groups, which may block on other ranks."""
        self._wait_for_readers()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    def _wait_for_readers(self) -> None:
        """Keeps a store hosted by this process alive until the other ranks have read it, or for two heartbeats."""
        if self.rank != self._store_host:
            return
        deadline = time.monotonic() + 2.5 * INTERVAL

        def left() -> list[int]:
            heard = {*self._silent, *(rank for kind in ("seen", "failed", "ended") for rank in self._read_names(kind))}
            return [rank for rank in range(self.world_size) if rank != self.rank and rank not in heard]

        while time.monotonic() < deadline:
            # The watchdog thread itself exits the process if the main thread is stuck.
            try:
                if not (left() if threading.current_thread() is self else self._ask(left)):
                    return
            except (ConnectionError, dist.DistError):
                return
            time.sleep(0.05)

    def _report_end(self) -> None:
        # The last heartbeat contains the final step count.
        self._beat()
        self._store.set(f"ended/{self.rank}", "")

    def _on_exit(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            if not self._stopped:
                self._ask(self._report_end)
                self._wait_for_readers()
        except ConnectionError:
            # No store is left to report to.
            pass
        # A thread that returns from a store call during interpreter shutdown aborts the process (SIGABRT).
        self.stop()


def running_watch() -> RankWatchdog | None:
    """Returns the watchdog of the current default process group."""
    for thread in threading.enumerate():
        if isinstance(thread, RankWatchdog) and thread.group is dist.group.WORLD:
            return thread
    return None


def watch_ranks(timeout: float, store_host: int | None, records: Path | None = None) -> None:
    """Sets the timeout of every process group and starts this rank's watchdog, once per default process group.

    Does nothing for a fake process group, which has no other ranks that could fail.

    Args:
        timeout (`float`): seconds that a collective may take.
        store_host (`int`, *optional*): rank whose process hosts the job's store; `None` if a launcher hosts it.
        records (`Path`, *optional*): directory for the flight records of ranks that hang.
    """
    if dist.get_backend() == "fake":
        return
    set_group_timeouts(timeout)
    watch = running_watch()
    if watch is not None:
        watch.timeout = timeout
        return
    for thread in threading.enumerate():
        if isinstance(thread, RankWatchdog):
            thread.stop()
    if records is not None:
        # Remove the record of an earlier job.
        record_path(records, dist.get_rank()).unlink(missing_ok=True)
    RankWatchdog(default_store("hf_megatron/watch"), timeout, store_host, records).start()
