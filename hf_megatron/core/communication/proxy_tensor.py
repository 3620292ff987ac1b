"""Proxy tensors for entries stored somewhere else; code that bypasses `__torch_dispatch__` reads a copy of them."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...compat.torch_autograd import changes_shape_in_place
from ...compat.torch_dtensor import local_tensor, register_dtensor_subclass
from ...errors import UnsupportedError


def protect(array: Any) -> Any:
    """Returns a numpy array of any shape that raises when it is written to: it is a copy, so the edit would be lost."""
    array.flags.writeable = False
    return array


def no_shared_memory(tensor: Tensor) -> UnsupportedError:
    """Returns the error for a library that would share the memory of a sharded tensor."""
    return UnsupportedError(
        f"DLPack of a sharded tensor of shape {tuple(tensor.shape)}: its entries lie on several ranks. Call "
        "full_tensor() first, or clone() where it has none, and copy edits back with copy_()."
    )


def reject_shape_edit(func: Any, tensor: Tensor) -> None:
    """Raises `UnsupportedError` for an operator that changes the shape of a proxy, which has no memory to reshape."""
    if changes_shape_in_place(func):
        name = func._schema.name.removeprefix("aten::")
        raise UnsupportedError(
            f"{name}() of a sharded tensor of shape {tuple(tensor.shape)} changes its shape in place. Call "
            f"{name.removesuffix('_')}() instead, which returns a new tensor."
        )


class ProxyTensor(Tensor):
    """Tensor of any shape without storage of its own; subclasses implement `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return protect(local_tensor(self.clone()).numpy(*args, **kwargs))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise no_shared_memory(self)

    def tolist(self) -> Any:
        return local_tensor(self.clone()).tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        # Do not read the entries: that is a collective, and a single rank may print.
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class ProxyDTensor(ProxyTensor, DTensor):
    """Proxy of a `DTensor`; `DTensor` accepts no other tensor type as an operand."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_dtensor_subclass(cls)

    def to_local(self, **kwargs: Any) -> Tensor:
        return self.clone().to_local(**kwargs)  # type: ignore[attr-defined]

    def full_tensor(self, **kwargs: Any) -> Tensor:
        return self.clone().full_tensor(**kwargs)  # type: ignore[attr-defined]

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        return self.clone().redistribute(*args, **kwargs)  # type: ignore[attr-defined]
