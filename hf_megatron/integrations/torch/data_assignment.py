"""Assignment to `.data` of a parameter: a tensor without values on this pipeline stage raises.

torch would give the parameter the missing memory of that tensor, and the next read of it would end the process.
"""

from typing import Any

from torch import Tensor, nn

from ...core.off_stage import is_off_stage
from ...core.off_stage_ops import off_stage_values_error


def _assign(parameter: Any, value: Any) -> None:
    if is_off_stage(value):
        raise off_stage_values_error(value.place)
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
