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
    """Records the memory of selected optimizer steps in folders `step{N}`, the input of `hf-megatron debug memory`.

    Args:
        directory (`str` or `Path`): parent folder of the step folders.
        steps (`Iterable[int]`, defaults to `(1,)`): optimizer steps, counted from 0. When the first step of a run
            begins, there are no optimizer moments yet.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (1,)) -> None:
        super().__init__(directory, steps)

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> StepMemory:
        """Returns the memory recorder of one step."""
        return StepMemory(folder, model, optimizer)


class NonFiniteCallback(WatchCallback):
    """Reruns skipped steps and prints on rank 0 the first non-finite value: its rank, microbatch, stage and module.

    `reports` holds the findings.

    Args:
        limit (`int`, defaults to 3): maximum number of reports in a run.

    Raises:
        ConfigError: when training begins, for a model that was not parallelized.
    """

    def __init__(self, limit: int = 3) -> None:
        super().__init__(limit=limit)

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> NonFiniteWatch:
        """Returns the watch that inspects skipped steps."""
        return NonFiniteWatch(model, optimizer, **arguments)


class RecordStepCallback(StepToolCallback):
    """Records selected optimizer steps in folders `step{N}`, the input of `hf-megatron debug compare`.

    Args:
        directory (`str` or `Path`): parent folder of the step folders.
        steps (`Iterable[int]`, defaults to `(0,)`): optimizer steps, counted from 0.
        modules (`str`, *optional*): regular expression on module names, see `StepRecorder`.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (0,), *, modules: str = "") -> None:
        super().__init__(directory, steps)
        self.modules = modules

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> StepRecorder:
        """Returns the recorder of one step."""
        return StepRecorder(folder, model, optimizer, modules=self.modules)


class StragglerCallback(WatchCallback):
    """Prints on rank 0 which rank is slow, by how much, and in which module and function.

    `reports` holds the findings.

    Args:
        arguments: keyword arguments of `StragglerWatch`, such as `steps` and `factor`.

    Raises:
        ConfigError: when training begins, for a model that was not parallelized or a value out of range.
    """

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> StragglerWatch:
        """Returns the watch that times every rank."""
        return StragglerWatch(model, optimizer, **arguments)
