"""Out-of-memory report of a rank: the failing module, bytes by category, and the largest tensors."""

import gc
import json
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_dtensor import local_tensor
from ..compat.torch_memory import snapshot_on_oom, storage_key
from ..core.io.safe_paths import replace_file
from ..data_parallel.distributed_optimizer import stepping_optimizer
from ..data_parallel.sharded_grad import ShardedGrad
from ..parallel_state import parallel_state, unwrap_parallel_model
from .step_memory import kept_tensors

_SHOWN = 20
# The CPU allocator raises a plain RuntimeError, which only this text identifies.
_CPU_ALLOCATOR = "can't allocate memory"
# Excludes storages that only autograd holds.
_OTHERS = "others that Python holds"


class MemorySnapshot:
    """Writes a memory snapshot when a step runs out of memory; create one on every rank.

        with MemorySnapshot("snapshots", model, optimizer):
            trainer.train()

    The file `rank{N}.json` has the failing module, bytes by category, and the largest tensors. On GPUs `rank{N}.pickle`
    is torch's own snapshot, for https://pytorch.org/memory_viz: the allocator then records stack traces of allocations,
    which costs a few percent of a step.

    Args:
        directory: created when the first snapshot is written.
        model: parallelized or single-process.
        optimizer (*optional*): of the model.
    """

    def __init__(self, directory: str | os.PathLike[str], model: Any, optimizer: torch.optim.Optimizer | None = None):
        self.directory, self.model, self.optimizer = (
            Path(directory),
            unwrap_parallel_model(model),
            stepping_optimizer(optimizer),
        )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        state = parallel_state(model)
        device = next(self.model.parameters()).device if state is None else state.mesh.device
        self._observed = snapshot_on_oom(self._file("pickle")) if device.type == "cuda" else None

    def _file(self, kind: str) -> Path:
        return self.directory / f"rank{self.rank:05}.{kind}"

    def __enter__(self) -> "MemorySnapshot":
        if self._observed is not None:
            self._observed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observed is not None:
            self._observed.__exit__(kind, error, trace)
        if error is not None and is_oom_error(error):
            self._write(error)

    def _write(self, error: BaseException) -> None:
        place = self._place(error)
        # Read tensors now: frames of the traceback still hold the step's tensors.
        record = {
            "rank": self.rank,
            "error": str(error).partition("\n")[0],
            "where": place,
            "bytes": self._by_use(),
            "largest": [
                {"bytes": size, "shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": str(tensor.device)}
                for size, tensor in sorted(_live(), key=lambda entry: -entry[0])[:_SHOWN]
            ],
        }
        if torch.cuda.is_initialized():
            record["allocator"] = torch.cuda.memory_stats()
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._file("json"), lambda path: path.write_text(json.dumps(record, indent=1), encoding="utf-8"))
        print(f"hf_megatron: rank {self.rank}: no memory left in {place}; see {self._file('json')}", flush=True)

    def _place(self, error: BaseException) -> str:
        """Returns the innermost module of the traceback with the line, or else the innermost function."""
        names = {id(module): name for name, module in self.model.named_modules() if name}
        place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names:
                place = f"{names[id(module)]} ({os.path.basename(frame.f_code.co_filename)}:{line})"
        if place:
            return place
        frame, line = [*traceback.walk_tb(error.__traceback__)][-1]
        return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{line})"

    def _by_use(self) -> dict[str, int]:
        bytes_by_use: Counter[str] = Counter()
        seen: set[int] = set()
        for use, tensors in kept_tensors(self.model, self.optimizer).items():
            for tensor in map(local_tensor, tensors):
                if storage_key(tensor) not in seen:
                    seen.add(storage_key(tensor))
                    bytes_by_use[use] += tensor.untyped_storage().nbytes()
        bytes_by_use[_OTHERS] = sum(size for size, tensor in _live() if storage_key(tensor) not in seen)
        return dict(bytes_by_use)


def is_oom_error(error: BaseException) -> bool:
    """Returns whether an error, or one of its causes, is an out-of-memory error of a device or the host."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _live() -> Iterator[tuple[int, Tensor]]:
    """Yields the size of each storage reachable from Python, with one tensor of it."""
    seen: set[int] = set()
    for one in gc.get_objects():
        # Check `type`, not `isinstance`: weak proxies report the class of their referent and raise once it is gone.
        # A `ShardedGrad` holds no data, and reading it is a collective.
        if issubclass(type(one), Tensor) and not issubclass(type(one), ShardedGrad):
            tensor = local_tensor(one)
            if tensor.layout is torch.strided and tensor.device.type != "meta" and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                yield tensor.untyped_storage().nbytes(), tensor
