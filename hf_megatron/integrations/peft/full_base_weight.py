"""A base's weight in full, for what PEFT computes of it when it makes an adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.communication.full_tensor import take_part, whole_of
from ...core.off_stage import is_absent
from ...data_parallel.engine import engine_of


@contextmanager
def whole_base(base: nn.Module) -> Iterator[None]:
    """Has a linear hold its weight in full inside, on the ranks of every stage; what it is afterwards is kept.

    Every rank enters it.
    """
    weight: Any = base._parameters["weight"]
    engine = engine_of(weight)
    if engine is None:
        yield
        return
    state, claim = engine.state, engine.claim(weight)
    assert claim is not None
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=state.mesh.device)
    if not is_absent(weight):
        whole = whole_of(weight)
    if state.cut is not None:
        dist.broadcast(whole, group=state.mesh.pp_group, group_src=state.cut.owner(claim.name))
    base._parameters["weight"] = nn.Parameter(whole, requires_grad=False)
    before = whole.clone()
    try:
        yield
        changed: Any = base._parameters["weight"]
    finally:
        base._parameters["weight"] = weight
    if not is_absent(weight) and not torch.equal(changed.detach(), before):
        _write(changed.detach(), weight)


@torch.no_grad()
def _write(whole: Tensor, weight: Tensor) -> None:
    if isinstance(weight, DTensor):
        take_part(whole, weight)
    else:
        weight.copy_(whole)


def agree_on(*tensors: Tensor) -> None:
    """Gives all ranks the first one's values of tensors of any shape: of singular vectors each may choose the sign."""
    for tensor in tensors:
        dist.broadcast(tensor.data, 0)
