"""`parameter.data = ...` with a tensor of another pipeline stage, which torch would accept and crash on later."""

from typing import Any

from torch import Tensor, nn

from ...core.off_stage import is_off_stage
from ...errors import UnsupportedError


def _assign(parameter: Any, value: Any) -> None:
    """Assigns `data` of a parameter of any shape; raises `UnsupportedError` for a tensor without values."""
    if is_off_stage(value):
        raise UnsupportedError(
            f"`parameter.data = ...` got a tensor without values on this rank, because its source {value.place}. Use "
            "vectors of one pipeline stage: hf_megatron.local_named_parameters(model) lists this rank's parameters."
        )
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


class CheckedData:
    """Override of `torch.nn.Parameter.data`, until `remove()`."""

    def __init__(self) -> None:
        # `Parameter` inherits the attribute.
        nn.Parameter.data = property(Tensor.data.__get__, _assign)  # type: ignore[attr-defined, assignment]

    def remove(self) -> None:
        del nn.Parameter.data


def check_assigned_data() -> CheckedData:
    """Installs the override and returns its removal handle."""
    return CheckedData()
