"""Parameters that are single numbers (Moonshine Streaming's), which transformers' loader asks for a first dim."""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from ...compat.torch_dtensor import accept_full
from ...core.mesh import is_of_layout


def plan_shard(original: Callable, self: Any, param: DTensor) -> None:
    """Plans how this rank's part of a parameter is read: all of one that has no dims."""
    if param.dim() == 0 and is_of_layout(param.device_mesh):
        accept_full(self, param)
    else:
        original(self, param)
