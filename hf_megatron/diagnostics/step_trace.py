"""Tracer of a step: a rank's computation, and for each communication its ranks, issue time, and waits.

Every rank writes its own file; `trace_breakdown.py` merges the files of a job. On CPU ranks everything is measured from
Python, where a wait blocks the thread. On accelerators the host runs ahead, so times come from kernels
(`kernel_spans.py`).
"""

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..compat.shard_safe import runs_last, shard_safe
from ..compat.torch_autograd import in_backward
from ..compat.torch_distributed import communication_through, group_description
from ..core.spans import clock_offset
from ..data_parallel.distributed_optimizer import stepping_optimizer
from ..data_parallel.fsdp import outermost_layers
from ..errors import ConfigError
from ..parallel_state import is_rerunning_step, parallel_state, unwrap_parallel_model
from .kernel_spans import device_profiler, get_kernel_trace
from .rank_files import rank_file
from .rank_trace import Communication, RankTrace
from .stack_sampler import QueuedTime

# Labels of time outside the layers; `AROUND` is time outside forward, backward, and optimizer step.
FORWARD, BACKWARD, STEP, AROUND = "forward", "backward", "optimizer", "around the step"
_POINT_TO_POINT = ("send", "recv")
# Package -> axis. Several axes may have groups with the same ranks: the calling package then identifies the axis.
_ROOMS = {
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "pipeline_parallel": "pp",
    "expert_parallel": "ep",
    "data_parallel": "dp",
}


class StepTrace:
    """Traces this rank's work inside the context, usually one step, into a folder; create one on every rank.

        with StepTrace("traces/step2", model, optimizer):
            model(**batch).loss.backward()
            optimizer.step()

    Args:
        directory: created if missing; must hold no trace yet.
        model: parallelized or single-process.
        optimizer (*optional*): its step gets a label of its own.

    Raises:
        ConfigError: the folder has a trace.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.directory, self.model, self.optimizer = (
            Path(directory),
            unwrap_parallel_model(model),
            stepping_optimizer(optimizer),
        )
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if rank_file(self.directory, self.rank).exists():
            raise ConfigError(f"StepTrace({str(directory)!r}): the folder already has a trace; choose another one.")
        state = parallel_state(model)
        self._state = state
        layers = {id(layer) for layer in outermost_layers(self.model)}
        self.layers = {name: module for name, module in self.model.named_modules() if id(module) in layers}
        # A parallelized model's first parameter may be off-stage and have no device: use the device of the mesh.
        device = next(self.model.parameters()).device if state is None else state.mesh.device
        self._profiler = None if device.type == "cpu" else device_profiler(device)
        self._computed: list[tuple[str, float, float]] = []
        self._calls: list[Communication] = []
        self._open: dict[int, tuple[Any, Communication]] = {}
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._label, self._since = AROUND, 0.0
        self._lock = threading.RLock()
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> "StepTrace":
        self._offset = _offset()
        model, optimizer = self.model, self.optimizer
        handles = [
            model.register_forward_pre_hook(self._turn_to_forward),
            model.register_forward_hook(self._leave_forward),
        ]
        for name, layer in self.layers.items():
            handles.append(layer.register_forward_pre_hook(self._enter_layer(name)))
            handles.append(layer.register_forward_hook(self._leave_layer(name)))
        if optimizer is not None:
            handles.append(optimizer.register_step_pre_hook(lambda *_: self._turn_to(STEP)))
            handles.append(optimizer.register_step_post_hook(lambda *_: self._turn_to(AROUND)))
        through = communication_through(self._call, self._wait)
        through.__enter__()
        self._undo = [*(handle.remove for handle in handles), lambda: through.__exit__(None, None, None)]
        if self._profiler is not None:
            self._profiler.__enter__()
        self._queue = QueuedTime(threading.get_native_id())
        self._queued = self._queue.seconds()
        self._start = self._since = time.time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop, queued = self._close(AROUND), self._queue.seconds() - self._queued
        self._queue.close()
        for undo in self._undo:
            undo()
        if self._profiler is not None:
            self._profiler.__exit__(kind, error, trace)
        if kind is not None:
            return
        rank_trace = RankTrace(
            self.rank,
            self.ranks,
            "" if self._state is None else self._state.config.layout(),
            self._offset,
            self._start,
            stop,
            self._computed,
            self._calls,
            queued=queued,
        )
        if self._profiler is not None:
            rank_trace = get_kernel_trace(self._profiler, rank_trace)
        rank_trace.write(self.directory)

    # Computation

    def _turn_to(self, label: str) -> None:
        if not is_rerunning_step(self._state):
            self._close(label)

    def _close(self, label: str) -> float:
        """Closes the current span of computation, opens one with `label`, and returns the time of the switch."""
        with self._lock:
            now = time.time()
            if now > self._since:
                self._computed.append((self._label, self._since, now))
            self._label, self._since = label, now
        return now

    @shard_safe
    def _turn_to_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._turn_to(FORWARD)

    @runs_last
    def _leave_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            # The caller may still compute a loss from the output; the backward begins when the output's gradient
            # arrives.
            self._watch(BACKWARD, output)
            self._turn_to(AROUND)

    def _enter_layer(self, name: str) -> Callable[..., None]:
        @shard_safe
        def enter(module: nn.Module, args: Any) -> None:
            if not in_backward():
                self._turn_to(f"{FORWARD} {name}")

        return enter

    def _leave_layer(self, name: str) -> Callable[..., None]:
        @runs_last
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self._watch(f"{BACKWARD} {name}", output)
                self._turn_to(FORWARD)

        return leave

    def _watch(self, label: str, output: Any) -> None:
        """Registers a hook that switches to `label` when the gradient of an output arrives."""
        for value in tree_iter(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self._turn_to(label))
                return

    # Communication

    def _call(self, call: Callable[[], Any], group: Any, name: str, args: tuple) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1 or is_rerunning_step(self._state):
            return call()
        if name in _POINT_TO_POINT:
            other = ranks[args[1]]
            ranks = (self.rank, other) if name == "send" else (other, self.rank)
        axis = self._get_axis(group)
        with self._lock:
            key = axis, ranks
            communication = Communication(axis, name.strip("_"), ranks, self._counts[key], time.time())
            self._counts[key] += 1
            self._calls.append(communication)
        work = self._timed(call, communication)
        if isinstance(work, dist.Work):
            # Hold a reference, so that no other object gets the same id.
            self._open[id(work)] = work, communication
        return work

    def _get_axis(self, group: Any) -> str:
        """Returns the axis of a group; torch reuses the world group for every axis of the size of the job."""
        named, ranks = (
            (group_description(group) or "").removeprefix("mesh_"),
            tuple(dist.get_process_group_ranks(group)),
        )
        if self._state is None:
            return named
        same_ranks = [name for name, axis in self._state.axes.named if axis.size > 1 and axis.ranks(self.rank) == ranks]
        names = [name for name in _ROOMS.values() if name in same_ranks]
        if named in names or not names:
            return "job" if len(ranks) == self.ranks and not names else named
        frame = sys._getframe()
        while len(names) > 1 and frame.f_back is not None:
            frame = frame.f_back
            room = str(frame.f_globals.get("__name__")).split(".")[1:2]
            if room and _ROOMS.get(room[0]) in names:
                return _ROOMS[room[0]]
        return names[0]

    def _wait(self, wait: Callable[[], Any], work: Any) -> Any:
        _, communication = self._open.pop(id(work), (None, None))
        return wait() if communication is None else self._timed(wait, communication)

    def _timed(self, function: Callable[[], Any], communication: Communication) -> Any:
        # Use one timestamp for both spans, so that no time counts twice.
        label = self._label
        start = self._close(AROUND)
        result = function()
        with self._lock:
            stop = time.time()
            communication.waits.append((start, stop))
            self._label, self._since = label, stop
        return result


def _offset() -> float:
    """Returns the time by which this clock is ahead of rank 0's; 0 if all ranks are on one host."""
    if not dist.is_initialized():
        return 0.0
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return clock_offset() if len(set(hosts)) > 1 else 0.0
