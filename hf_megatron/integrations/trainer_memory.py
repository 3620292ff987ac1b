"""Trainer counts what steps hold in memory, to be compared with their plan."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ..debug.step_memory import StepMemory


class MemoryCallback(TrainerCallback):
    """Writes what some optimizer steps held into folders `step{N}`, which `hf-megatron debug memory` takes.

    Args:
        directory (`str` or `Path`): where the folders go.
        steps (`Iterable[int]`, defaults to `(1,)`): optimizer steps, counted from 0. The first one of a run has no
            moments yet when it begins.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (1,)) -> None:
        self.directory, self.steps = Path(directory), frozenset(steps)
        self._memory: StepMemory | None = None

    def on_step_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step in self.steps:
            # Accelerate's is around the one that steps.
            steps = getattr(optimizer, "optimizer", optimizer)
            self._memory = StepMemory(self.directory / f"step{state.global_step}", model, steps)
            self._memory.__enter__()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            self._memory = None
