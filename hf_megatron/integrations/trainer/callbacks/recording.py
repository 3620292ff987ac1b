"""Trainer records steps, to be compared with those of another run."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....diagnostics.recording import StepRecorder
from .base import StepToolCallback


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
