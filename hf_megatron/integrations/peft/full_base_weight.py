"""A base's weight in full, for what PEFT computes of it when it makes an adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.communication.full_tensor import copy_local_shard, full_tensor_of
from ...core.off_stage import is_off_stage
from ...data_parallel.engine import engine_of


@contextmanager
def full_base_weight(base: nn.Module) -> Iterator[None]:
    """Has a linear hold its weight in full inside, on the ranks of every stage; what it is afterwards is kept.

    Every rank enters it.
    """
    weight: Any = base._parameters["weight"]
    engine = engine_of(weight)
    if engine is None:
        yield
        return
    state, sharding = engine.state, engine.parameters.sharding(weight)
    assert sharding is not None
    unsharded = torch.empty(weight.shape, dtype=weight.dtype, device=state.mesh.device)
    if not is_off_stage(weight):
        unsharded = full_tensor_of(weight)
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
    """Gives all ranks the first one's values of tensors of any shape: of singular vectors each may choose the sign."""
    for tensor in tensors:
        dist.broadcast(tensor.data, 0)
