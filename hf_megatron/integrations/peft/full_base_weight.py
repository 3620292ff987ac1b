"""Full base weight for PEFT initializations that are computed from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.communication.full_tensor import copy_local_shard, gather_full_tensor
from ...core.off_stage import is_off_stage
from ...data_parallel.engine import get_engine


@contextmanager
def full_base_weight(base: nn.Module) -> Iterator[None]:
    """Replaces a linear's weight by the full tensor, on the ranks of every stage, and writes changes back at the end.

    A collective context: every rank enters it.
    """
    weight: Any = base._parameters["weight"]
    engine = get_engine(weight)
    if engine is None:
        yield
        return
    state, sharding = engine.state, engine.parameters.sharding(weight)
    assert sharding is not None
    unsharded = torch.empty(weight.shape, dtype=weight.dtype, device=state.mesh.device)
    if not is_off_stage(weight):
        unsharded = gather_full_tensor(weight)
    # Off-stage ranks receive `[out, in]` from the owning stage.
    if state.cut is not None:
        dist.broadcast(unsharded, group=state.mesh.pp_group, group_src=state.cut.owner(sharding.name))
    base._parameters["weight"] = nn.Parameter(unsharded, requires_grad=False)
    before = unsharded.clone()
    try:
        yield
        changed: Any = base._parameters["weight"]
    finally:
        base._parameters["weight"] = weight
    if not is_off_stage(weight) and not torch.equal(changed.detach(), before):
        _write(changed.detach(), weight)


@torch.no_grad()
def _write(unsharded: Tensor, weight: Tensor) -> None:
    if isinstance(weight, DTensor):
        copy_local_shard(unsharded, weight)
    else:
        weight.copy_(unsharded)


def agree_on(*tensors: Tensor) -> None:
    """Broadcasts the first rank's values of tensors of any shape: the signs of singular vectors are arbitrary."""
    for tensor in tensors:
        dist.broadcast(tensor.data, 0)
