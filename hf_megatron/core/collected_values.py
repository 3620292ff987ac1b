"""Full values of sharded and off-stage tensors, kept in CPU memory of the rank that writes them.

Training scripts take a state dict on every rank and write it on one. The values are collected where every rank takes
part; the tensors stay sharded, so other uses of them do not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.torch_dtensor import local_tensor

_COLLECTED = "_hf_megatron_collected"
# Methods whose result has the values of their tensor, at most in another dtype.
VALUE_PRESERVING = ("detach", "cpu", "clone", "contiguous", "to", "float", "half", "bfloat16")


@dataclass
class Collection:
    """Weights of one model, collected while they do not change.

    Attributes:
        is_current: False once an optimizer step or `load_state_dict` has changed the weights.
    """

    is_current: bool = True


@dataclass(frozen=True)
class CollectedValue:
    """Record of a collected tensor.

    Attributes:
        full (`Tensor`, *optional*): the full value `[...]`; `None` on ranks other than the one that writes.
        edits: number of edits of the tensor when it was collected.
        collection (`Collection`, *optional*): for a tensor that shares memory with a weight.
    """

    full: Tensor | None
    edits: int
    collection: Collection | None


def _count_edits(tensor: Any) -> int:
    # Edits of an off-stage tensor drop its record.
    return tensor._version + local_tensor(tensor)._version if isinstance(tensor, DTensor) else 0


def attach_value(tensor: Tensor, full: Tensor | None, collection: Collection | None) -> None:
    """Marks a sharded or off-stage tensor as collected, with the full value of the same global shape `[...]`."""
    vars(tensor)[_COLLECTED] = CollectedValue(full, _count_edits(tensor), collection)


def drop_value(tensor: Tensor) -> None:
    """Drops the full value of a tensor of any shape, if there is one."""
    vars(tensor).pop(_COLLECTED, None)


def _record(tensor: Any) -> CollectedValue | None:
    record: CollectedValue | None = vars(tensor).get(_COLLECTED)
    if record is None or record.edits != _count_edits(tensor):
        return None
    return record if record.collection is None or record.collection.is_current else None


def collected_value(tensor: Any) -> Tensor | None:
    """Returns the full value `[...]` of a tensor in its dtype; `None` without one, and after edits of the tensor."""
    record = _record(tensor)
    return None if record is None or record.full is None else record.full.to(tensor.dtype)


def is_full_or_collected(value: Any) -> bool:
    """Returns whether a tensor is plain, or marked as collected and not edited since."""
    return type(value) in (Tensor, nn.Parameter) or (isinstance(value, Tensor) and _record(value) is not None)


def pass_on_value(tensor: Any, result: Any, method: str) -> Any:
    """Marks the result of a value-preserving method as collected if its tensor, of any shape, is; returns it."""
    if _COLLECTED in vars(tensor) and result is not tensor and (record := _record(tensor)) is not None:
        attach_value(result, record.full, None if method == "clone" else record.collection)
    return result


def with_collected_values(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the full values in place of the sharded and off-stage tensors that have them."""
    full_values = {}
    for name, tensor in tensors.items():
        full = collected_value(tensor) if isinstance(tensor, Tensor) and type(tensor) is not Tensor else None
        full_values[name] = tensor if full is None else full
    return full_values
