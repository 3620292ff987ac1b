"""Assignment to `.data` of a plain parameter: a tensor without plain memory raises.

torch would give the parameter the missing memory of a tensor on another pipeline stage, or of a DTensor, and the next
read of it would end the process.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.off_stage import is_off_stage
from ...core.off_stage_ops import off_stage_values_error
from ...errors import UnsupportedError


def _assign(parameter: Any, value: Any) -> None:
    if is_off_stage(value):
        raise off_stage_values_error(value.place)
    if isinstance(value, DTensor) and not isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"`.data` of a plain parameter of shape {tuple(parameter.shape)} was assigned a sharded tensor. Assign "
            "value.full_tensor(), a copy of its values."
        )
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


class DataAssignment:
    """Override of `nn.Parameter.data`, until `remove()`."""

    def __init__(self) -> None:
        nn.Parameter.data = property(Tensor.data.__get__, _assign)  # type: ignore[attr-defined, assignment]

    def remove(self) -> None:
        del nn.Parameter.data


def replace_data_assignment() -> DataAssignment:
    """Installs the override and returns its removal handle."""
    return DataAssignment()
