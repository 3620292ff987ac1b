"""Private fields of `DTensor` read for lists of tensors, without a Python call per tensor."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

_Value = TypeVar("_Value", Tensor, Tensor | None)


def list_local_tensors(tensors: Iterable[_Value]) -> list[_Value]:
    """Returns the local tensors of DTensors, and other tensors (or `None`) unchanged, all of any shape."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def share_specs(tensors: Sequence[Tensor | None], others: Sequence[Tensor]) -> bool:
    """Returns whether the DTensors among tensors of any shape have the same spec objects as `others`, pair by pair."""
    shared = [
        not isinstance(tensor, DTensor) or not isinstance(other, DTensor) or tensor._spec is other._spec
        for tensor, other in zip(tensors, others, strict=True)
    ]
    return all(shared)
