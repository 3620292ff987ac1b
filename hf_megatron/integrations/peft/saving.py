"""Adapters in full, from all shards and stages: they are small, so that every rank may have them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.communication.full_tensor import full_tensor_of
from ...core.off_stage import is_off_stage
from ...parallel_state import ParallelState

# What PEFT puts in front of a model's names.
_WRAPPED = "base_model.model."


def full_adapter(tensors: Mapping[str, Any], state: ParallelState) -> dict[str, Any]:
    """Returns an adapter's tensors in full on every rank; all of them call it.

    Args:
        tensors: by PEFT's names, this rank's parts of them, or what stands for those of other stages.
    """
    return {
        name: _unsharded(name, tensor, state) if isinstance(tensor, Tensor) else tensor
        for name, tensor in tensors.items()
    }


def is_replicated(tensors: Mapping[str, Any]) -> bool:
    """Tells whether a rank has all of the values of some tensors of any shape."""
    return not any(isinstance(tensor, DTensor) or is_off_stage(tensor) for tensor in tensors.values())


def _unsharded(name: str, tensor: Tensor, state: ParallelState) -> Tensor:
    is_here = not is_off_stage(tensor)
    unsharded = (
        full_tensor_of(tensor) if is_here else torch.empty(tensor.shape, dtype=tensor.dtype, device=state.mesh.device)
    )
    if state.cut is not None:
        owner = state.cut.owner(name.removeprefix(_WRAPPED))
        dist.broadcast(unsharded, group=state.mesh.pp_group, group_src=owner)
    return unsharded
