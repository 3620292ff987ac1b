"""Callbacks around diagnostics tools: step memory, recordings, non-finite values and stragglers."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....diagnostics.nonfinite import NonFiniteWatch
from ....diagnostics.recording import StepRecorder
from ....diagnostics.step_memory import StepMemory
from ....diagnostics.stragglers import StragglerWatch
from .base import StepToolCallback, WatchCallback


class MemoryCallback(StepToolCallback):
    """Writes what some optimizer steps held into folders `step{N}`, which `hf-megatron debug memory` takes.

    Args:
        directory (`str` or `Path`): where the folders go.
        steps (`Iterable[int]`, defaults to `(1,)`): optimizer steps, counted from 0. The first one of a run has no
            moments yet when it begins.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (1,)) -> None:
        super().__init__(directory, steps)

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> StepMemory:
        """Returns what counts a step."""
        return StepMemory(folder, model, optimizer)


class NonFiniteCallback(WatchCallback):
    """Runs skipped steps again, and prints on rank 0 which rank, microbatch, stage and module was not finite first.

    `reports` has what was found.

    Args:
        limit (`int`, defaults to 3): reports of a run.

    Raises:
        ConfigError: when training begins, a model that was not laid out.
    """

    def __init__(self, limit: int = 3) -> None:
        super().__init__(limit=limit)

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> NonFiniteWatch:
        """Returns what looks at skipped steps."""
        return NonFiniteWatch(model, optimizer, **arguments)


class RecordStepCallback(StepToolCallback):
    """Writes some optimizer steps into folders `step{N}`, which `hf-megatron debug compare` takes.

    Args:
        directory (`str` or `Path`): where the folders go.
        steps (`Iterable[int]`, defaults to `(0,)`): optimizer steps, counted from 0.
        modules (`str`, *optional*): as of `StepRecorder`.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (0,), *, modules: str = "") -> None:
        super().__init__(directory, steps)
        self.modules = modules

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> StepRecorder:
        """Returns what records a step."""
        return StepRecorder(folder, model, optimizer, modules=self.modules)


class StragglerCallback(WatchCallback):
    """Prints on rank 0 which rank is slow, how much, and in which module and function; `reports` has what was found.

    Args:
        arguments: of `StragglerWatch`, such as `steps` and `factor`.

    Raises:
        ConfigError: when training begins, a model that was not laid out, or a number out of its range.
    """

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> StragglerWatch:
        """Returns what looks at every rank."""
        return StragglerWatch(model, optimizer, **arguments)
