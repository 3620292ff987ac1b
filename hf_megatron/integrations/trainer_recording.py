"""Trainer records steps, to be compared with those of another run."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ..debug.recording import StepRecorder


class RecordStepCallback(TrainerCallback):
    """Writes some optimizer steps into folders `step{N}`, which `hf-megatron debug compare` takes.

    Args:
        directory (`str` or `Path`): where the folders go.
        steps (`Iterable[int]`, defaults to `(0,)`): optimizer steps, counted from 0.
        modules (`str`, *optional*): as of `StepRecorder`.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (0,), *, modules: str = "") -> None:
        self.directory, self.steps, self.modules = Path(directory), frozenset(steps), modules
        self._recorder: StepRecorder | None = None

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
            folder = self.directory / f"step{state.global_step}"
            self._recorder = StepRecorder(folder, model, steps, modules=self.modules)
            self._recorder.__enter__()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None
