"""`parameter.data = ...` on split parameters: a DTensor keeps its local part beside what torch assigns."""

from typing import Any


class AssignableData:
    """Puts a property in front of `torch.Tensor.data` of DTensors, until `remove()`."""

    def __init__(self) -> None:
        from torch import Tensor
        from torch.distributed.tensor import DTensor

        self._class = DTensor
        DTensor.data = property(Tensor.data.__get__, assign)  # type: ignore[assignment, attr-defined]

    def remove(self) -> None:
        del self._class.data


def assign(parameter: Any, value: Any) -> None:
    """Gives a DTensor of a laid out model the data of another one, local part included, of any shape.

    Raises:
        UnsupportedError: the value is no DTensor that lies like the parameter.
    """
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from ..errors import UnsupportedError

    is_own = vars(parameter).get("_hf_megatron") is not None
    if is_own and not (isinstance(value, DTensor) and value.placements == parameter.placements):
        raise UnsupportedError(
            "`parameter.data = ...` on a split parameter takes a DTensor that lies like it, such as `parameter.data * "
            "0.5`; copy whole tensors with `model.load_state_dict(..., strict=False)`."
        )
    if is_own and value.dtype == parameter.dtype:
        # Into the memory that optimizers and FSDP2 know.
        with torch.no_grad():
            parameter._local_tensor.copy_(value._local_tensor)
        return
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
    if is_own:
        parameter._local_tensor, parameter._spec = value._local_tensor, value._spec


def make_assignable() -> AssignableData:
    """Registers the property, and returns what takes it back."""
    return AssignableData()
