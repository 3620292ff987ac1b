"""Weights whose layout in files differs from memory (`Transpose`, `Chunk`, `Concatenate`).

The transformers loader slices what it reads by the placements of the target parameter. That slice is wrong when dims or
blocks are reordered in between, or when the target is only half of the stored tensor. Such weights are read and
rearranged in full on every rank, one at a time, and each rank keeps its local shard.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.transformers_loading import rearranged_targets
from ...core.communication.full_tensor import shard_like
from ...parallel_state import ParallelState, RearrangedWeights


def expose_full_tensors(model: Any, state: ParallelState) -> None:
    """Registers a state-dict hook that shows the loader rearranged split parameters as full meta tensors.

    `stop_exposing_full_tensors` removes it.
    """
    patterns = rearranged_targets(model)
    split = [name for name, sharding in state.shardings.items() if sharding.placement.on(state.axes).is_split]
    names = frozenset(name for name in split if any(re.search(pattern, name) for pattern in patterns))
    hook = model.register_state_dict_post_hook(_as_full(names)) if names else None
    state.rearranged = RearrangedWeights(names, hook)


def stop_exposing_full_tensors(state: ParallelState) -> None:
    """Removes the hook of `expose_full_tensors` once the weights are loaded."""
    if state.rearranged.hook is not None:
        state.rearranged.hook.remove()
    state.rearranged = RearrangedWeights()


def own_part(model: Any, state: ParallelState, name: str, weight: Tensor) -> Tensor:
    """Returns this rank's shard of a weight `[...]`, which the loader has read in full or has sliced already."""
    parameter = model.get_parameter(name) if name in state.rearranged.names else None
    return shard_like(weight, parameter) if isinstance(parameter, DTensor) else weight


def _as_full(names: frozenset[str]) -> Any:
    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in names & state_dict.keys():
            weight = state_dict[name]
            # A plain meta tensor has no placements, so the loader does not slice this weight.
            state_dict[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    return hook
