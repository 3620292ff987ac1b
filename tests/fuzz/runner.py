"""Runner of cases on forked ranks and in a single process: many cases share a fork, a failing one is rerun alone."""

import contextlib
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_megatron.core.fork_harness import leave_parents_objects, make_ready_to_fork, run_ranks
from hf_megatron.errors import RankError
from tests.fuzz.cases import count_ranks, draws
from tests.fuzz.generators import draw_model
from tests.fuzz.judging import compare_runs, judge_case
from tests.fuzz.loop import compute_gradient_norm, run_loop
from tests.fuzz.patterns import get_patterns

_BETTER = {"float32": "float64", "bfloat16": "float32"}
# A single-process run that moves by this fraction of the error through rounding alone is no reference.
_UNSTABLE = 0.3
# Number of perturbed single-process runs that estimate the effect of rounding.
_DISTURBED = 4
# In units of the tolerance. A ReLU whose input is zero up to rounding, on for one summation order and off for the
# other, reached 364.
_ROUND_OFF_AT_MOST = 3000
# Number of cases per fork; each leaves file descriptors and threads.
_TOGETHER = 16


def run_cases(
    cases: Sequence[dict[str, Any]], timeout: float = 20.0
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields each case with its result (`judgment`, `worst` and `seconds`), grouped by cases that can share a fork.

    Args:
        cases: cases from `cases.draw_case` or `simple_case`.
        timeout (`float`): seconds per case; a longer run is a hang.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, case in enumerate(cases):
        # Accelerator and Trainer keep per-process state.
        alone = case["loop"] != "plain" or "stock afterwards" in case["loop_patterns"]
        groups.setdefault(number if alone else count_ranks(case["layout"]), []).append(case)
    for group in groups.values():
        for first in range(0, len(group), _TOGETHER):
            for case, result in _run_group(group[first : first + _TOGETHER], timeout):
                if result["judgment"] in ("crash", "hang") and len(group) > 1:
                    # Rule out earlier cases in the same fork and a busy machine as the cause.
                    [(_, again)] = _run_group([case], 2 * timeout)
                    result = again | {"seconds": round(result["seconds"] + again["seconds"], 2)}  # noqa: PLW2901
                yield case, result


def _run_group(cases: list[dict[str, Any]], timeout: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="hf_megatron_fuzz_", ignore_cleanup_errors=True) as directory:
        runs = [_Run(case, Path(directory) / str(number)) for number, case in enumerate(cases)]
        begin = time.monotonic()
        run_in_fork([run.draw for run in runs], timeout)
        waiting = runs
        while waiting:
            _run_on_ranks(waiting, timeout)
            # The case that stopped the group has a result too, unless all its ranks died.
            left = [run for run in waiting if not run.is_done]
            waiting = left if len(left) < len(waiting) else left[1:]
        run_in_fork([run.in_one_process for run in runs], timeout)
        results = [run.judge(timeout) for run in runs]
    seconds = (time.monotonic() - begin) / len(runs)
    for run, result in zip(runs, results, strict=True):
        yield run.case, result | {"seconds": round(seconds, 2)}


class _Run:
    """A case and its result files."""

    def __init__(self, case: dict[str, Any], place: Path):
        self.case, self.place = case, place
        place.mkdir()

    @property
    def is_done(self) -> bool:
        """Whether a rank has written its result."""
        return any((self.place / f"rank{rank}").exists() for rank in range(count_ranks(self.case["layout"])))

    def full_case(self) -> dict[str, Any]:
        """Returns the case with the gradient norm of its model."""
        file = self.place / "norm"
        return self.case | {"norm": pickle.loads(file.read_bytes()) if file.exists() else 1.0}

    def draw(self) -> None:
        """Saves the random model and its gradient norm."""
        if self.case["way"] == "from_config":
            return
        loop_patterns = get_patterns(self.case["loop_patterns"])
        try:
            draw_model(self.case, loop_patterns, str(self.place / "start"))
            norm = compute_gradient_norm(self.case, loop_patterns, str(self.place / "start"))
        except Exception:  # noqa: BLE001, the loop raises it again and reports it
            norm = 1.0
        (self.place / "norm").write_bytes(pickle.dumps(norm))

    def on_rank(self) -> dict[str, Any]:
        """Trains on this rank."""
        loop_patterns = get_patterns(self.case["loop_patterns"])
        return run_loop(self.full_case(), loop_patterns, str(self.place / "start"), str(self.place / "ranks"), True)

    def in_one_process(self) -> None:
        """Trains in this process."""
        loop_patterns = get_patterns(self.case["loop_patterns"])
        case, place = self.full_case(), self.place
        result = run_loop(case, loop_patterns, str(place / "start"), str(place / "one"), False)
        (place / "one_process").write_bytes(pickle.dumps(result))

    def train_nearby(self) -> None:
        """Trains in this process in the next higher precision and from perturbed weights."""
        loop_patterns = [
            loop_pattern for loop_pattern in get_patterns(self.case["loop_patterns"]) if loop_pattern.name != "bfloat16"
        ]
        case, place = self.full_case(), self.place
        was_cast = len(loop_patterns) < len(self.case["loop_patterns"])
        precise = {} if was_cast else {"dtype": _BETTER[case["dtype"]]}
        disturbed: list[dict[str, Any]] = [{"disturbed": seed} for seed in range(1, _DISTURBED + 1)]
        for number, change in enumerate([precise, *disturbed]):
            chosen = loop_patterns if number == 0 else get_patterns(self.case["loop_patterns"])
            result = run_loop(case | change, chosen, str(place / "start"), str(place / f"nearby{number}"), False)
            _write(place / f"nearby_process{number}", result)

    def judge(self, timeout: float) -> dict[str, Any]:
        """Reads the result files and returns the judgment."""
        missing = {"error": "the process died", "kinds": ["Died"], "steps": 0, "traceback": ""}
        files = [self.place / f"rank{rank}" for rank in range(count_ranks(self.case["layout"]))]
        ranks = [pickle.loads(file.read_bytes()) if file.exists() else missing for file in files]
        file = self.place / "one_process"
        one = pickle.loads(file.read_bytes()) if file.exists() else missing
        if draws(self.case) and "error" not in one:
            one = None
        folders = {name: self.place / name for name in ("start", "ranks", "one")}
        result = judge_case(self.case, ranks, one, folders) | {"norm": self.full_case()["norm"]}
        small = result["judgment"] == "differs" and (result["error"] or _ROUND_OFF_AT_MOST) < _ROUND_OFF_AT_MOST
        if small and one is not None and self._is_unstable(one, result["error"], timeout):
            result["judgment"] = "unstable"
        return result

    def _is_unstable(self, one: Mapping[str, Any], error: float, timeout: float) -> bool:
        """Returns whether the single-process run itself changes by a similar error through rounding."""
        run_in_fork([self.train_nearby], timeout * (1 + _DISTURBED))
        for file in sorted(self.place.glob("nearby_process?")):
            near = pickle.loads(file.read_bytes())
            folders = {name: self.place / name for name in ("start", "one")}
            folders["ranks"] = self.place / file.name.replace("_process", "")
            if "error" not in near and compare_runs(self.case, [near], one, folders).worst.value > _UNSTABLE * error:
                return True
        return False


def _run_on_ranks(runs: list[_Run], timeout: float) -> None:
    """Runs cases on the same forks until one of them fails."""
    size = count_ranks(runs[0].case["layout"])

    def on_rank() -> None:
        rank = dist.get_rank()
        for run in runs:
            with _Watchdog(run.place / f"rank{rank}", timeout):
                result = run.on_rank()
            _write(run.place / f"rank{rank}", result)
            if not _all_ranks_finished(run, size, "error" in result, timeout):
                return

    # Each rank has written its result file.
    with contextlib.suppress(RankError):
        run_ranks(on_rank, size, timeout=(timeout + 5.0) * len(runs))


def _write(file: Path, result: Mapping[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(dict(result)))
    partial.rename(file)


def _all_ranks_finished(run: _Run, size: int, failed: bool, timeout: float) -> bool:
    """Waits for the results of the other ranks; returns whether all of them finished the case."""
    # Ranks that wait for a failed rank end when it exits.
    deadline = time.monotonic() + (0.5 if failed else timeout)
    files = [run.place / f"rank{rank}" for rank in range(size)]
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.002)
    return all(file.exists() and "error" not in pickle.loads(file.read_bytes()) for file in files)


class _Watchdog:
    """Context manager that exits the process after a timeout and writes its stack."""

    def __init__(self, file: Path, timeout: float):
        self.file, self.timer = file, threading.Timer(timeout, self._end)
        self.timeout, self.thread = timeout, threading.get_ident()
        self.timer.daemon = True

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *exception: object) -> None:
        self.timer.cancel()

    def _end(self) -> None:
        frames = sys._current_frames()
        text = "".join(traceback.format_stack(frames[self.thread])) if self.thread in frames else ""
        error = f"not done after {self.timeout:g} s"
        _write(self.file, {"error": error, "kinds": ["Hang"], "steps": 0, "traceback": text[-3000:]})
        os._exit(3)


def run_in_fork(functions: Sequence[Callable[[], None]], timeout: float) -> None:
    """Calls functions in a fork, which is killed after `timeout` seconds per function."""
    make_ready_to_fork()
    process = os.fork()
    if process == 0:
        try:
            leave_parents_objects()
            torch.set_num_threads(1)
            for function in functions:
                function()
        except BaseException:  # noqa: BLE001, a fork must not return
            traceback.print_exc()
        finally:
            os._exit(0)
    deadline = time.monotonic() + timeout * len(functions)
    while time.monotonic() < deadline:
        if os.waitpid(process, os.WNOHANG)[0]:
            return
        time.sleep(0.003)
    os.kill(process, 9)
    os.waitpid(process, 0)
