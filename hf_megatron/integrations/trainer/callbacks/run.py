"""Trainer callback that records a run for its report: logs, throughput, stragglers, step memory and a step trace."""

import math
import os
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_callback import TrainerControl, TrainerState

from ....data_parallel.distributed_optimizer import ShardedOptimizer, list_sharded, stepping_optimizer
from ....diagnostics.run_record import (
    RunFacts,
    add_logs,
    add_skipped,
    add_straggler,
    memory_folder,
    trace_folder,
    why_not_another,
)
from ....diagnostics.step_memory import StepMemory
from ....diagnostics.step_trace import StepTrace
from ....diagnostics.stragglers import Straggler, StragglerWatch
from ....errors import ConfigError
from ....parallel_state import ParallelState, parallel_state, unwrap_parallel_model
from .base import ToolCallback, ToolOfStep
from .throughput import ThroughputCallback

_PACKAGES = ("hf_megatron", "torch", "transformers", "accelerate", "trl", "peft")
_AXES = ("dp", "pp", "cp", "tp")


class RunCallback(ThroughputCallback, ToolCallback):
    """Records a run into a folder that `hf-megatron debug report` turns into one HTML file.

    Adds `tokens_per_second`, `tflops_per_device` and `mfu` to the logs, as `ThroughputCallback` does, and reports slow
    ranks, as `StragglerCallback` does. A run resumed from a checkpoint continues in the same folder.

    Args:
        directory (`str` or `Path`): folder of the run, visible to all ranks.
        peak_tflops (`float`, *optional*): as in `ThroughputCallback`.
        memory_step (`int`, *optional*, defaults to 1): step whose memory is recorded, counted from 0; it takes several
            times as long as other steps.
        trace_step (`int`, *optional*, defaults to 2): step that is traced, counted from 0.
        stragglers (`bool`, defaults to `True`): whether to detect slow ranks.

    Raises:
        ConfigError: an invalid step, or the same step for memory and trace; when training begins, for a model that was
            not parallelized or a folder that holds another run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        peak_tflops: float | None = None,
        memory_step: int | None = 1,
        trace_step: int | None = 2,
        stragglers: bool = True,
    ) -> None:
        for name, step in (("memory_step", memory_step), ("trace_step", trace_step)):
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise ConfigError(f"RunCallback({name}={step!r}): expected an optimizer step, counted from 0, or None.")
        if memory_step is not None and memory_step == trace_step:
            raise ConfigError(
                f"RunCallback(memory_step={memory_step}, trace_step={trace_step}): expected two different steps."
            )
        super().__init__(peak_tflops)
        self.directory = Path(directory)
        self.memory_step, self.trace_step, self.stragglers = memory_step, trace_step, stragglers
        self._watch: StragglerWatch | None = None
        self._recorder = ToolOfStep()
        self._held: list[ShardedOptimizer] = []

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        parallel = parallel_state(model)
        if parallel is None:
            raise ConfigError(
                "RunCallback records a parallelized model. Load the model with megatron_config=, or remove the "
                "callback."
            )
        facts = _facts(model, parallel)
        # Rank 0 checks the folder and broadcasts the result.
        answer = [""]
        if dist.get_rank() == 0:
            answer = [why_not_another(self.directory, state.global_step)]
        dist.broadcast_object_list(answer)
        if answer[0]:
            raise ConfigError(f"RunCallback: {answer[0]}")
        if dist.get_rank() == 0:
            facts.write(self.directory)
        self._held = list_sharded(stepping_optimizer(optimizer))
        super().on_train_begin(args, state, control, model=model)
        if self.stragglers:
            self._watch = StragglerWatch(model, optimizer, say=self._tell)
        # Wait until rank 0 has created the folder.
        dist.barrier()

    def _tell(self, report: Straggler) -> None:
        print(f"hf_megatron: {report}", flush=True)
        add_straggler(self.directory, report.step, str(report))

    def on_step_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        kinds = (self.memory_step, memory_folder, StepMemory), (self.trace_step, trace_folder, StepTrace)
        for step, folder, recorder in kinds:
            # A resumed run may have this record already, possibly on another host.
            if state.global_step == step and not _on_any_rank(folder(self.directory).exists()):
                self._recorder.begin(recorder(folder(self.directory), model, optimizer))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._recorder.end(is_done=True)
        super().on_step_end(args, state, control)
        if any(held.step_was_skipped for held in self._held) and dist.get_rank() == 0:
            # Trainer leaves non-finite losses out of its logs.
            add_skipped(self.directory, state.global_step)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and dist.get_rank() == 0:
            add_logs(self.directory, {"step": state.global_step, "time": time.time(), **logs})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.abandon()
        if dist.get_rank() == 0:
            print(f"hf_megatron: hf-megatron debug report {self.directory}", flush=True)

    def abandon(self) -> None:
        """Removes all tools."""
        super().abandon()
        self._recorder.end(is_done=False)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


def _facts(model: Any, state: ParallelState) -> RunFacts:
    inner, axes = unwrap_parallel_model(model), state.axes
    sizes = {name: axes.size(name) for name in _AXES}
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    tied = dict(getattr(inner, "all_tied_weights_keys", {}))
    is_device = state.mesh.device_type == "cuda"
    device = torch.cuda.get_device_properties(torch.cuda.current_device()) if is_device else None
    return RunFacts(
        type(inner).__name__,
        sum(math.prod(sharding.shape) for name, sharding in state.shardings.items() if name not in tied),
        state.config.layout(),
        len(hosts),
        sizes | ({"ep": axes.size("ep")} if axes.size("ep") > 1 else {}),
        [[axes.of_rank(rank).rank(name) for name in _AXES] for rank in range(len(hosts))],
        hosts,
        state.mesh.device_type if device is None else device.name,
        None if device is None else device.total_memory,
        {name: metadata.version(name) for name in _PACKAGES if _is_there(name)},
        time.time(),
    )


def _on_any_rank(flag: bool) -> bool:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, flag)
    return any(answers)


def _is_there(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))
