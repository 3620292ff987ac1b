"""Full adapter tensors, gathered from all shards and stages; small enough for every rank to hold."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.collected_values import is_full_or_collected, with_collected_values
from ...core.communication.full_tensor import gather_full_tensor
from ...core.off_stage import is_off_stage
from ...errors import UnsupportedError
from ...parallel_state import ParallelState

# Prefix that PEFT adds to the model's parameter names.
_WRAPPED = "base_model.model."


def full_adapter(tensors: Mapping[str, Any], state: ParallelState) -> dict[str, Any]:
    """Returns an adapter's full tensors on every rank; a collective call.

    Args:
        tensors: local shards by PEFT's names, or placeholders for tensors of other stages.
        state: state of the model.
    """
    return {
        name: _unsharded(name, tensor, state) if isinstance(tensor, Tensor) else tensor
        for name, tensor in tensors.items()
    }


def is_replicated(tensors: Mapping[str, Any]) -> bool:
    """Returns whether a rank holds all tensors in full."""
    return not any(isinstance(tensor, DTensor) or is_off_stage(tensor) for tensor in tensors.values())


def require_full_adapter(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with collected values in place of shards.

    Raises:
        UnsupportedError: a tensor is sharded or off-stage, and its full value was not collected.
    """
    full = with_collected_values(tensors)
    if not all(map(is_full_or_collected, full.values())):
        raise UnsupportedError(
            "PeftModel.save_pretrained(state_dict=...) requires full tensors on rank 0, as returned by "
            "accelerator.get_state_dict(model). Omit state_dict to gather the adapter from the ranks."
        )
    return full


def _unsharded(name: str, tensor: Tensor, state: ParallelState) -> Tensor:
    is_here = not is_off_stage(tensor)
    unsharded = (
        gather_full_tensor(tensor)
        if is_here
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=state.mesh.device)
    )
    # The owning stage broadcasts the full tensor to the other stages.
    if state.cut is not None:
        owner = state.cut.owner(name.removeprefix(_WRAPPED))
        dist.broadcast(unsharded, group=state.mesh.pp_group, group_src=owner)
    return unsharded
