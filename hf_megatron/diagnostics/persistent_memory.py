"""What a rank keeps from step to step, by what it is for."""

from typing import Any

import torch
from torch import Tensor

from ..core.off_stage import local_named_parameters
from ..data_parallel.distributed_optimizer import sharded
from ..parallel_state import parallel_state


def kept_tensors(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, list[Tensor]]:
    """Lists what is kept from step to step on this rank, of any shape, by what it is for.

    Args:
        model: laid out by this library.
        optimizer (*optional*): prepared.
    """
    kept: dict[str, list[Tensor]] = {"weights": [*(p for _, p in local_named_parameters(model)), *model.buffers()]}
    state = parallel_state(model)
    reducer = None if state is None or state.data_parallel is None else state.data_parallel.reducer
    kept |= {} if reducer is None else reducer.memory()
    attached = None if optimizer is None else sharded(optimizer)
    return kept | ({} if attached is None else attached.memory())
