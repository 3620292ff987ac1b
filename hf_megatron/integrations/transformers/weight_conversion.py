"""Weights that files hold in another arrangement than memory does (`Transpose`, `Chunk`, `Concatenate`).

The loader of transformers cuts what it reads by the placements of the parameter that it becomes: another part where
dims or rows change places in between, or where it becomes a half of that one. Such a weight is read, and rearranged,
whole on every rank, which then keeps its part; one at a time is in memory.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.transformers_loading import rearranged_targets
from ...core.communication.full_tensor import shard_like
from ...parallel_state import ParallelState


def read_full(model: Any, state: ParallelState) -> None:
    """Has the loader take the split parameters that files hold rearranged for whole ones, until `stop_reading`."""
    patterns = rearranged_targets(model)
    split = [name for name, sharding in state.shardings.items() if sharding.placement.on(state.axes).is_split]
    state.rearranged = frozenset(name for name in split if any(re.search(pattern, name) for pattern in patterns))
    if state.rearranged:
        state.reading = model.register_state_dict_post_hook(_as_full(state.rearranged))


def stop_reading(state: ParallelState) -> None:
    """Ends what `read_full` began, once the weights are in."""
    if state.reading is not None:
        state.reading.remove()
        state.reading = None
    state.rearranged = frozenset()


def own_part(model: Any, state: ParallelState, name: str, weight: Tensor) -> Tensor:
    """Returns this rank's part of a weight `[...]`, of which the loader has the whole, or else has cut it already."""
    parameter = model.get_parameter(name) if name in state.rearranged else None
    return shard_like(weight, parameter) if isinstance(parameter, DTensor) else weight


def _as_full(names: frozenset[str]) -> Any:
    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in names & state_dict.keys():
            weight = state_dict[name]
            state_dict[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    return hook
