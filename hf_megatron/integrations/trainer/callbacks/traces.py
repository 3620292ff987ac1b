"""Trainer traces steps: what each rank computed, communicated and waited for."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import TrainerControl, TrainerState

from ....diagnostics.rank_trace import traces_in
from ....diagnostics.step_trace import StepTrace
from ....diagnostics.trace_breakdown import as_table, shares_of
from .base import StepToolCallback


class TraceCallback(StepToolCallback):
    """Writes the traces of some optimizer steps into folders `step{N}`, which `hf-megatron debug trace` merges.

    On rank 0 the shares of each kind of time are printed, as far as all ranks write to one file system.

    Args:
        directory (`str` or `Path`): where the folders go.
        steps (`Iterable[int]`, defaults to `(2,)`): optimizer steps, counted from 0. The first ones of a run are slower
            than the rest.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (2,)) -> None:
        super().__init__(directory, steps)

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> StepTrace:
        """Returns what traces a step."""
        return StepTrace(folder, model, optimizer)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trace = self._tool.end(is_done=True)
        if trace is None:
            return
        if trace.ranks > 1:
            dist.barrier()
        files = [*trace.directory.glob("rank*.json")]
        if trace.rank == 0 and len(files) == trace.ranks:
            print(f"hf_megatron: {trace.directory}\n{as_table(shares_of(traces_in(trace.directory)))}", flush=True)
