"""Trainer counts what steps hold in memory, to be compared with their plan."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....diagnostics.step_memory import StepMemory
from .base import StepToolCallback


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
