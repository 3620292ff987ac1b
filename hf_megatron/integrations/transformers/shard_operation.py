"""Patched shard reading: experts that are split block by block, and parameters without dims."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...compat.torch_dtensor import accept_full, place_in_run
from ...core.mesh import is_layout_mesh


def shard_tensor(
    original: Callable, self: Any, source: Any, tensor_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Reads this rank's shard of a stored weight `[...]`; `None` if it is an expert of another rank."""
    if tensor_idx is not None and is_layout_mesh(self.device_mesh):
        tensor_idx = place_in_run(self, source, tensor_idx)
        if tensor_idx is None:
            return None
    part: Tensor | None = original(self, source, tensor_idx, *args, **kwargs)
    return part


def plan_shard(original: Callable, self: Any, param: DTensor) -> None:
    """Plans which slice of a parameter this rank reads; a parameter without dims is read in full."""
    if param.dim() == 0 and is_layout_mesh(param.device_mesh):
        accept_full(self, param)
    else:
        original(self, param)
