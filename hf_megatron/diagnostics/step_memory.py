"""Measured memory of one step on this rank by category, in a file that can be compared with a plan."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_autograd import dispatch_modes, in_backward
from ..compat.transformers_models import checkpoints_activations
from ..core.off_stage import local_named_parameters
from ..data_parallel.distributed_optimizer import sharded, stepping_optimizer
from ..errors import ConfigError
from ..parallel_state import parallel_state, unwrap_parallel_model
from .allocation_tracker import AllocationTracker
from .rank_files import rank_file, read_rank_files, write_rank_file

MEMORY = "memory of a step"


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory of one rank in a step, in bytes.

    Attributes:
        rank, ranks (`int`): this rank and the world size.
        pipeline_rank (`int`): its pipeline stage.
        layout: of the model, as values of `MegatronConfig`.
        config: of the model.
        attention: its implementation.
        dtype, device: of the weights.
        rows, length (`int`): batch size and sequence length of a microbatch.
        microbatches (`int`): of a call.
        trains_all: whether no parameter is frozen.
        kept: category -> bytes when the step began.
        peak: peak memory.
        at_peak: category -> bytes at the peak.
        layers: layer -> bytes retained by its first call.
        allocator: peak allocated and reserved memory of an accelerator's allocator.
    """

    rank: int
    ranks: int
    pipeline_rank: int
    layout: dict[str, Any]
    config: dict[str, Any]
    attention: str
    dtype: str
    device: str
    rows: int
    length: int
    microbatches: int
    trains_all: bool
    kept: dict[str, int]
    peak: int
    at_peak: dict[str, int]
    layers: dict[str, int]
    allocator: dict[str, int] = field(default_factory=dict)


class StepMemory:
    """Measures this rank's memory during a step and writes it; create one on every rank.

        with StepMemory("memory/step2", model, optimizer):
            model(**batch).loss.backward()
            optimizer.step()

    It tracks tensors with `AllocationTracker`, which makes the step take several times as long. An optimizer has its
    moments from its second step on.

    Args:
        directory: created if missing; must hold no record yet.
        model: parallelized.
        optimizer: prepared.

    Raises:
        ConfigError: the model was not parallelized, the folder has a record, or on entry, the step is already measured.
    """

    def __init__(self, directory: str | os.PathLike[str], model: Any, optimizer: torch.optim.Optimizer):
        self.directory, self.optimizer = Path(directory), stepping_optimizer(optimizer)
        self.model, state = unwrap_parallel_model(model), parallel_state(model)
        if state is None:
            raise ConfigError(f"StepMemory requires a model that was loaded with megatron_config=, got {type(model)}.")
        self.state = state
        self.path = rank_file(self.directory, dist.get_rank())
        if self.path.exists():
            raise ConfigError(f"StepMemory({str(directory)!r}): the folder already has a record; choose another one.")
        self._tracker = AllocationTracker(self.model)
        self._shape = (0, 0)

    def __enter__(self) -> "StepMemory":
        if any(isinstance(mode, AllocationTracker) for mode in dispatch_modes()):
            raise ConfigError(
                "StepMemory: this step is already recorded. Remove MemoryCallback if RunCallback is used, or give it "
                "other steps."
            )
        self._hook = self.model.register_forward_pre_hook(self._note_batch, with_kwargs=True)
        self._is_on_device = self.state.mesh.device_type != "cpu"
        if self._is_on_device:
            torch.cuda.reset_peak_memory_stats()
        self._tracker.__enter__()
        self._tracker.begin_step(kept_tensors(self.model, self.optimizer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.__exit__(kind, error, trace)
        self._hook.remove()
        if kind is None:
            write_rank_file(self.path, MEMORY, asdict(self._found()))

    def _note_batch(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.dim() == 2 and not in_backward():
            self._shape = max(self._shape, (ids.shape[0], ids.shape[1]))

    def _found(self) -> MeasuredMemory:
        figures, (rows, length) = self._tracker.figures, self._shape
        config, pipeline = self.model.config, self.state.pipeline
        layout = self.state.config.to_dict()
        if layout["recompute"] is None and checkpoints_activations(self.model):
            layout["recompute"] = "full"
        microbatches = 1 if pipeline is None else min(rows, pipeline.describe()["microbatches"])
        weights = [parameter for _, parameter in local_named_parameters(self.model)]
        allocator = {}
        if self._is_on_device:
            allocator = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return MeasuredMemory(
            dist.get_rank(),
            dist.get_world_size(),
            self.state.mesh.pp_rank,
            layout,
            config.to_dict(),
            str(config._attn_implementation),
            str(weights[0].dtype).removeprefix("torch."),
            self.state.mesh.device_type,
            rows // microbatches,
            length,
            microbatches,
            all(parameter.requires_grad for parameter in weights),
            figures.kept,
            figures.peak,
            figures.at_peak,
            {name: sum(causes.values()) for (name, call), causes in figures.layers.items() if call == 0},
            allocator,
        )


def memory_in(directory: str | os.PathLike[str]) -> list[MeasuredMemory]:
    """Reads the records of all ranks of a job, in rank order.

    Raises:
        ConfigError: the folder has no records, or files of another kind.
    """
    return read_rank_files(Path(directory), MEMORY, lambda said: MeasuredMemory(**said))


def kept_tensors(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, list[Tensor]]:
    """Returns the tensors that this rank keeps between steps, of any shape, by category.

    Args:
        model: parallelized.
        optimizer (*optional*): prepared.
    """
    kept: dict[str, list[Tensor]] = {"weights": [*(p for _, p in local_named_parameters(model)), *model.buffers()]}
    state = parallel_state(model)
    reducer = None if state is None or state.data_parallel is None else state.data_parallel.reducer
    kept |= {} if reducer is None else reducer.memory()
    attached = None if optimizer is None else sharded(optimizer)
    return kept | ({} if attached is None else attached.memory())
