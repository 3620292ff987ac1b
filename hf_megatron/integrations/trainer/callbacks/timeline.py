"""Trainer callback that plots the pipeline schedule of a step."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_callback import TrainerControl, TrainerState

from ....compat.ecosystem import require_plots
from ....core.spans import SpanRecorder
from ....diagnostics.timeline import gather_timeline, write_pictures
from ....errors import ConfigError
from ....parallel_state import parallel_state
from ....pipeline_parallel.schedule_simulator import bubble
from .base import ToolCallback


class TimelineCallback(ToolCallback):
    """Writes `timeline-step{N}.png` and `.json` for selected steps, on rank 0 of the job.

    On GPUs a recorded step synchronizes the device before and after every operation, and is slower than others.

    Args:
        directory (`str` or `Path`): output folder; created if missing.
        steps (`Iterable[int]`, defaults to `(2,)`): optimizer steps, counted from 0. The first steps of a run are
            slower than the rest.

    Raises:
        ConfigError: when training begins, for a model without a pipeline or, on rank 0, without matplotlib.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int] = (2,)) -> None:
        self.directory = Path(directory)
        self.steps = frozenset(steps)
        self._pipeline: Any = None
        self._group: dist.ProcessGroup | None = None
        self._recorder = SpanRecorder()
        # Step being recorded: Trainer increments `global_step` before `on_step_end`.
        self._step: int | None = None
        self._optimizer: Any = None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        parallel = parallel_state(model)
        if parallel is None or parallel.pipeline is None:
            raise ConfigError(
                "TimelineCallback draws a pipeline, but the model has none. Load it with "
                "megatron_config=MegatronConfig(pp_size=...) and pp_size of at least 2, or remove the callback."
            )
        if dist.get_rank() == 0:
            require_plots()
        self._pipeline, self._group = parallel.pipeline, parallel.mesh.pp_group
        self._recorder = SpanRecorder(torch.cuda.synchronize if parallel.mesh.device_type == "cuda" else None)
        self._step = None

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            self._step = state.global_step
            self._recorder.clear()
            self._pipeline.recorder = self._recorder

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._step is not None:
            self._optimizer = self._recorder.record("optimizer", dist.get_rank(self._group))
            self._optimizer.__enter__()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._optimizer is not None:
            self._optimizer.__exit__(None, None, None)
            self._optimizer = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._step is None:
            return
        self._pipeline.recorder = None
        facts = self._pipeline.describe()
        timeline = gather_timeline(self._recorder, self._group, **facts)
        if dist.get_rank() == 0:
            formula = bubble(facts["schedule"], facts["ranks"], facts["stages_per_rank"], timeline.microbatches)
            write_pictures(timeline, self.directory, f"timeline-step{self._step}", formula)
        self._step = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Stops recording."""
        if self._pipeline is not None:
            self._pipeline.recorder = None
