"""RankWatchdog: a rank that fails tells the others why; a rank that goes silent is named by those who waited for it.

Every rank runs one daemon thread with a client of its own on the job's store. Once a second it writes a heartbeat (a
counter, the optimizer steps so far and where the main thread is) and looks whether a rank reported a failure. It uses
no process group, so it works while every one of them is stuck.

    a rank raises             writes its traceback to the store, then leaves at once
    the others' collectives   raise (gloo) or hang (NCCL); they read the report, print it and leave
    no report                 the rank whose heartbeat stands still is named, and the operation this rank waited in
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
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...compat.torch_distributed import default_store, group_description, set_group_timeouts
from .flight_recorder import record_path, write_flight_record

# Seconds between heartbeats; a rank is silent after missing two.
INTERVAL = 1.0
# Seconds in which a reading of the store has to answer; a store on a stopped rank never does.
_STORE_SECONDS = 3.0
# After another rank failed, the main thread gets this long to end on its own (NCCL would wait for its timeout); and
# the thread to come back from the store when the process ends.
_GRACE_SECONDS = 10.0

_COMMUNICATION = ("torch.distributed", "hf_megatron.core.communication", "hf_megatron.compat.torch_distributed")
# Who waits for what another rank sends, beside those.
_WAITING = (
    *_COMMUNICATION,
    "hf_megatron.pipeline_parallel.p2p",
    "hf_megatron.pipeline_parallel.tied_weight_grads",
    "hf_megatron.expert_parallel.all_to_all",
    "hf_megatron.data_parallel.grad_reducer",
    "hf_megatron.data_parallel.param_gather",
)
_LIBRARIES = ("torch", "hf_megatron", "transformers", "accelerate", "trl", "peft", "contextlib", "threading", "runpy")


def _is_part_of(frame: FrameType, packages: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", "?"))
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _name(frame: FrameType) -> str:
    # `co_qualname` came with Python 3.11.
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name)).replace("<locals>.", "")


def _frames(trace: TracebackType | None) -> list[FrameType]:
    """Lists the frames of a traceback, innermost first."""
    return [frame for frame, _ in traceback.walk_tb(trace)][::-1]


def operation(frames: list[FrameType]) -> str | None:
    """Says what a stack, innermost frame first, waits for, `None` where it is not in a collective.

    Such as `all_reduce over mesh_tp in RowParallelLinear.forward (a.py:3)`.
    """
    # Operators and context managers of torch lie between a collective and its caller.
    inner = next((index for index, frame in enumerate(frames) if not _is_part_of(frame, ("torch._ops",))), 0)
    if not frames or not _is_part_of(frames[inner], _COMMUNICATION):
        return None
    outer = inner
    while outer < len(frames) and _is_part_of(frames[outer], (*_COMMUNICATION, "torch")):
        outer += 1
    run = [frame for frame in frames[inner:outer] if _is_part_of(frame, _COMMUNICATION)]
    calls = [frame for frame in run if _is_part_of(frame, ("torch.distributed",)) and frame.f_code.co_name != "wrapper"]
    name = _name(calls[-1] if calls else run[0])
    groups = [group_description(frame.f_locals.get("group")) for frame in run]
    group = next((description for description in groups if description), None)
    over = f" over {group}" if group else ""
    callers = [frame for frame in [*run, *frames[outer : outer + 1]] if _is_part_of(frame, ("hf_megatron",))]
    # The library's own caller says more than whoever called backward.
    caller = callers[-1] if callers else frames[outer] if outer < len(frames) else None
    return f"{name}{over}{f' in {_name(caller)}' if caller else ''}{_user_line(frames)}"


def is_in_communication(frame: FrameType) -> bool:
    """Tells whether a stack's innermost frame, but for torch's calls of operators, is in a collective."""
    inner: FrameType | None = frame
    while inner is not None and _is_part_of(inner, ("torch._ops",)):
        inner = inner.f_back
    return inner is not None and _is_part_of(inner, _WAITING)


def where(frame: FrameType) -> str:
    """Says in which function and line a stack's innermost frame is."""
    return f"{_name(frame)} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _user_line(frames: list[FrameType]) -> str:
    """Names the innermost line outside the libraries."""
    lines = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames if not _is_part_of(frame, _LIBRARIES))
    return next((f" ({os.path.basename(file)}:{number})" for file, number in lines), "")


def _place(frames: list[FrameType]) -> str:
    """Says where a stack is that is in no collective."""
    return f"{_name(frames[0])}{_user_line(frames)}" if frames else "no Python code"


def _after(steps: int) -> str:
    return f"after {steps} optimizer step{'' if steps == 1 else 's'}"


class RankWatchdog(threading.Thread):
    """Heartbeat and failure reports of this rank; `watch_ranks` starts it.

    Args:
        store (`dist.Store`): a client of the job's store that nobody else uses.
        timeout (`float`): seconds a collective may take.
        store_host (`int`, *optional*): the rank with which the store ends; by default a launcher holds it.
        records (`Path`, *optional*): where the flight record goes of a rank that stands still.
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
        self._first: dict[str, Any] | None = None
        self._first_seen_at = 0.0
        self._silent: list[int] = []
        self._stack: tuple[Any, ...] = ()
        self._stack_since = time.monotonic()
        self._early_beats: dict[int, dict[str, Any]] | None = None
        self._warned = False

    def start(self) -> None:
        """Installs the hooks and starts the thread."""
        self._previous, self._previous_of_threads = sys.excepthook, threading.excepthook
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        self._step_hook = register_optimizer_step_post_hook(self._count_step)
        atexit.register(self._on_exit)
        super().start()

    def stop(self) -> None:
        """Ends the thread and puts back what is still this watch's hook."""
        self._stopped = True
        self._step_hook.remove()
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_of_threads
        if threading.current_thread() is not self:
            self._requests.put((lambda: None, Future()))
            self.join(_GRACE_SECONDS)

    def _count_step(self, *args: Any) -> None:
        self.steps += 1

    # The thread

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
                # The store is gone, and with it whoever could read a heartbeat; `_ask` says so to a rank that fails.
                return
            try:
                answer.set_result(request())
            except dist.DistError as error:
                answer.set_exception(error)
                return

    def _beat(self) -> None:
        if self._first is not None:
            # The job is over, and the store may be gone.
            if not self._leaving and time.monotonic() - self._first_seen_at > _GRACE_SECONDS:
                self._leaving = True
                self._say(self._because_of(self._first, None))
                self._leave(1)
            return
        self._beats += 1
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
        waits = operation(frames)
        beat = {"beat": self._beats, "steps": self.steps, "time": time.strftime("%H:%M:%S")}
        self._store.set(f"beat/{self.rank}", json.dumps(beat | {"waits": waits, "at": waits or _place(frames)}))
        self._look_for_failure()
        if not self._leaving:
            self._look_for_stall((self.steps, *((each.f_code, each.f_lasti) for each in frames)), waits)

    def _look_for_failure(self) -> None:
        if self._store.check(["first"]):
            self._first = json.loads(self._store.get("first"))
            self._first_seen_at = time.monotonic()
            self._store.set(f"seen/{self.rank}", "")
        elif self._store_host is not None and self._store.check([f"ended/{self._store_host}"]):
            # A store that ends under its clients makes torch print a C++ stack in each.
            self._store.set(f"seen/{self.rank}", "")
            self._stopped = True

    def _look_for_stall(self, stack: tuple[Any, ...], waits: str | None) -> None:
        """Says who is missing shortly before the timeout: NCCL's own watchdog kills a process without asking Python."""
        now = time.monotonic()
        if stack != self._stack:
            self._stack, self._stack_since, self._early_beats, self._warned = stack, now, None, False
        elif self._early_beats is None and now - self._stack_since > 0.6 * self.timeout:
            self._early_beats = self._read_beats()
        elif self._early_beats is not None and not self._warned and now - self._stack_since > 0.85 * self.timeout:
            self._warned = True
            self._write_record(waits)
            beats = self._read_beats()
            silent = [rank for rank, beat in beats.items() if beat == self._early_beats.get(rank)]
            if waits or silent:
                where = waits or stack[1][0].co_name
                found = self._missing(silent, beats, self._read_names("ended"))
                self._say(f"rank {self.rank} has waited {now - self._stack_since:.0f} s in {where}. {found}")

    def _write_record(self, waits: str | None) -> None:
        """Writes what torch recorded of this rank's collectives, while the others' wait can still be told from it."""
        if self._records is None:
            return
        try:
            path = write_flight_record(self._records, self.steps, waits)
        except OSError as error:
            self._say(f"rank {self.rank}: its flight record was not written: {error}")
            return
        if path is not None:
            self._say(f"rank {self.rank} stands still: {path}; read all ranks': hf-megatron debug hang {self._records}")

    def _read_beats(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(self._store.get(f"beat/{rank}")) for rank in self._read_names("beat")}

    def _read_names(self, kind: str) -> list[int]:
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return [rank for rank in others if self._store.check([f"{kind}/{rank}"])]

    # The end of a rank

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Returns the thread's answer, or raises `ConnectionError` where the store does not answer.

        Only the thread talks to the store: a reading of a stopped host never returns.
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
        show = partial(self._previous, kind, error, trace)
        if os.getpid() != self._process or self._stopped or self.group is not dist.group.WORLD:
            show()
        else:
            self._fail(error, trace, show)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        mine = os.getpid() == self._process and not self._stopped and self.group is dist.group.WORLD
        show = partial(self._previous_of_threads, args)
        # A thread that ends elsewhere does not end the rank; in a collective it leaves the others waiting.
        if mine and args.exc_value is not None and operation(_frames(args.exc_traceback)) is not None:
            self._fail(args.exc_value, args.exc_traceback, show)
        else:
            show()

    def _fail(self, error: BaseException, trace: TracebackType | None, show: Callable[[], Any]) -> None:
        """Reports or explains an error that ends this rank, and leaves.

        `show` prints it in full: only where no other rank says the same, or was the cause.
        """
        self._leaving = True
        frames = _frames(trace)
        # A collective that raises usually does so because of another rank.
        waits = operation(frames) if isinstance(error, RuntimeError) else None
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
                f"rank {self.rank} {where} {_after(self.steps)}. The job's store does not answer: rank 0 or the "
                "launcher, which holds it, has ended or is stopped."
            )
        self._leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _explain(self, report: dict[str, Any], waits: str, show: Callable[[], Any]) -> None:
        """Says why a collective of this rank raised."""
        first, report["cause"] = self._cause()
        # Said before it is reported: launchers end the other ranks as soon as one has failed.
        if first is not None:
            self._say(self._because_of(first, waits))
        else:
            show()
            self._say(f"rank {self.rank} was waiting in {waits} {_after(self.steps)}. {report['cause']}")
        self._ask(lambda: self._report(report))

    def _tell(self, report: dict[str, Any], show: Callable[[], Any]) -> None:
        """Tells the other ranks of an error of this one."""
        first = self._ask(lambda: self._report(report))
        if first["rank"] != self.rank and first["error"] == report["error"]:
            self._say(f"rank {self.rank} failed like rank {first['rank']}.")
            return
        show()
        self._say(f"rank {self.rank} failed {_after(self.steps)}: {report['error']}\nThe other ranks are told.")
        if first["rank"] != self.rank:
            self._say(self._because_of(first, None))

    def _report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Leaves the report; returns that of the rank that failed first."""
        self._store.set(f"failed/{self.rank}", "")
        return json.loads(self._store.compare_set("first", "", json.dumps(report)))

    def _cause(self) -> tuple[dict[str, Any] | None, str | None]:
        """Finds why a collective of this rank raised: the first failure's report, or else who is missing."""
        if self._first is not None:
            return self._first, None
        early, deadline = self._ask(self._read_beats), time.monotonic() + 2.5 * INTERVAL
        while time.monotonic() < deadline:
            # The thread may have read it before the store ended.
            if self._first is not None:
                return self._first, None
            if self._ask(lambda: self._store.check(["first"])):
                return json.loads(self._ask(lambda: self._store.get("first"))), None
            time.sleep(0.05)
        beats, ended = self._ask(self._read_beats), self._ask(lambda: self._read_names("ended"))
        self._silent = [rank for rank, beat in beats.items() if beat == early.get(rank) and rank not in ended]
        return None, self._missing(self._silent, beats, ended)

    def _missing(self, silent: list[int], beats: dict[int, dict[str, Any]], ended: list[int]) -> str:
        """Writes a sentence for each rank that is not where this one waits for it."""
        found = [f"Rank {r} has ended: its script finished or left early, {_after(beats[r]['steps'])}." for r in ended]
        for rank in silent:
            if rank not in ended:
                beat = beats[rank]
                found.append(
                    f"Rank {rank} has gone silent (killed or stopped): last heartbeat {beat['time']}, "
                    f"{_after(beat['steps'])}, in {beat['at']}."
                )
        if not found:
            for rank, beat in beats.items():
                verb = "waits in" if beat["waits"] else "has not come to it, it is in"
                found.append(f"Rank {rank} {verb} {beat['at']}, {_after(beat['steps'])}.")
        return " ".join(found)

    def _because_of(self, first: dict[str, Any], waits: str | None) -> str:
        where = f"It was waiting in {waits}.\n" if waits else ""
        if first["cause"]:
            what = f"{first['cause']} Rank {first['rank']} found that first, {_after(first['steps'])}."
            return f"rank {self.rank} ends, {_after(self.steps)}. {where}{what}"
        return (
            f"rank {self.rank} ends because rank {first['rank']} failed first, {_after(first['steps'])}: "
            f"{first['error']}\n{where}Rank {first['rank']}: {first['traceback']}"
        )

    def _say(self, text: str) -> None:
        print(f"hf_megatron: {text}", file=sys.stderr, flush=True)

    def _leave(self, status: int) -> None:
        """Ends the process without the destructors of process groups, which may wait for the other ranks."""
        self._wait_for_readers()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    def _wait_for_readers(self) -> None:
        """Keeps a store of this process until the other ranks have read what is in it, or for two heartbeats."""
        if self.rank != self._store_host:
            return
        deadline = time.monotonic() + 2.5 * INTERVAL

        def left() -> list[int]:
            heard = {*self._silent, *(rank for kind in ("seen", "failed", "ended") for rank in self._read_names(kind))}
            return [rank for rank in range(self.world_size) if rank != self.rank and rank not in heard]

        while time.monotonic() < deadline:
            # The watch itself leaves where the main thread is stuck.
            try:
                if not (left() if threading.current_thread() is self else self._ask(left)):
                    return
            except (ConnectionError, dist.DistError):
                return
            time.sleep(0.05)

    def _report_end(self) -> None:
        # The last heartbeat says how many steps were taken.
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
            # Nobody is left to tell.
            pass
        # A thread that comes out of a call of the store while the interpreter ends takes the process with it (SIGABRT).
        self.stop()


def running_watch() -> RankWatchdog | None:
    """Returns the watch of the current default process group."""
    for thread in threading.enumerate():
        if isinstance(thread, RankWatchdog) and thread.group is dist.group.WORLD:
            return thread
    return None


def watch_ranks(timeout: float, store_host: int | None, records: Path | None = None) -> None:
    """Gives every process group `timeout` and starts this rank's watch, once per default process group.

    A fake process group has no other ranks that could fail.

    Args:
        timeout (`float`): seconds a collective may take.
        store_host (`int`, *optional*): the rank in whose process the job's store lives; `None` for a launcher's.
        records (`Path`, *optional*): where the flight record goes of a rank that stands still.
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
        # An earlier job's.
        record_path(records, dist.get_rank()).unlink(missing_ok=True)
    RankWatchdog(default_store("hf_megatron/watch"), timeout, store_host, records).start()
