"""Trainer callback that traces steps: compute, communication and waiting time of each rank."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import TrainerControl, TrainerState

from ....diagnostics.rank_trace import traces_in
from ....diagnostics.step_trace import StepTrace
from ....diagnostics.trace_breakdown import as_table, compute_shares
from .base import StepToolCallback


class TraceCallback(StepToolCallback):
    """Writes traces of selected optimizer steps into folders `step{N}`, the input of `hf-megatron debug trace`.

    If all ranks write to one file system, rank 0 prints the share of each kind of time.

    Args:
        directory (`str` or `Path`): parent folder of the step folders.
        steps (`Iterable[int]`, defaults to `(2,)`): optimizer steps, counted from 0. The first steps of a run are
            slower than the rest.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (2,)) -> None:
        super().__init__(directory, steps)

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> StepTrace:
        """Returns the tracer of one step."""
        return StepTrace(folder, model, optimizer)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trace = self._tool.end(is_done=True)
        if trace is None:
            return
        if trace.ranks > 1:
            dist.barrier()
        files = [*trace.directory.glob("rank*.json")]
        if trace.rank == 0 and len(files) == trace.ranks:
            print(f"hf_megatron: {trace.directory}\n{as_table(compute_shares(traces_in(trace.directory)))}", flush=True)
