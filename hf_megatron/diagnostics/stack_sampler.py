"""Sampling profiler of one thread: records its position many times a second from a second thread."""

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from types import FrameType

import torch
from torch import nn

from ..core.communication.call_stack import is_in_communication, where

# Frames of torch's module call; their `self` is the called module.
_CALLS = ("_call_impl", "_wrapped_call_impl")


class QueuedTime:
    """Time for which a thread was runnable while the machine ran others; 0 on systems other than Linux."""

    def __init__(self, native_id: int):
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)

    def seconds(self) -> float:
        """Returns this time in seconds since the thread began."""
        # Fields: nanoseconds running, nanoseconds waiting for a processor, number of time slices.
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Closes the schedstat file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ThreadSampler(threading.Thread):
    """Samples the thread that created it and accumulates the time per place, less the time when other processes ran.

    Other processes on a host take time from its ranks, unequally and by chance.
    """

    def __init__(self, model: nn.Module, interval: float):
        super().__init__(name="hf_megatron straggler watch", daemon=True)
        self._thread, self._interval = threading.get_ident(), interval
        self._queued = QueuedTime(threading.get_native_id())
        self._model = weakref.ref(model)
        # True if the last call was an evaluation, which no step counts. Check gradients, not the model's mode, since
        # models may be trained in eval mode.
        self._evaluates = False
        self._hook = model.register_forward_pre_hook(self._note_call)
        self._names: dict[int, str] = {}
        self._places: dict[str, float] = defaultdict(float)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self.start()

    def run(self) -> None:
        """Samples until the thread is stopped."""
        before, queued_before = time.monotonic(), self._queued.seconds()
        while not self._stopped.wait(self._interval):
            frame = sys._current_frames().get(self._thread)
            if frame is None:
                return
            now, queued = time.monotonic(), self._queued.seconds()
            busy_seconds = max(0.0, now - before - (queued - queued_before))
            before, queued_before = now, queued
            place = None if self._evaluates or is_in_communication(frame) else self._place(frame)
            if place is not None:
                with self._lock:
                    self._places[place] += busy_seconds

    def _note_call(self, model: nn.Module, args: tuple) -> None:
        self._evaluates = not torch.is_grad_enabled()

    def stop(self) -> None:
        """Stops the thread and removes the hook."""
        self._hook.remove()
        self._stopped.set()
        self.join()
        self._queued.close()

    def take(self) -> dict[str, float]:
        """Returns the seconds spent in each place, outside collectives, since the last call."""
        with self._lock:
            places, self._places = self._places, defaultdict(float)
        return dict(places)

    def _place(self, frame: FrameType) -> str:
        """Returns the name of the innermost module being called, and the function."""
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_name not in _CALLS:
            outer = outer.f_back
        module = None if outer is None else outer.f_locals.get("self")
        name = self._name_of(module) if isinstance(module, nn.Module) else None
        return f"{name}: {where(frame)}" if name else where(frame)

    def _name_of(self, module: nn.Module) -> str | None:
        if id(module) not in self._names and (model := self._model()) is not None:
            self._names = {id(other): name for name, other in model.named_modules()}
        return self._names.get(id(module))
