"""Tensors that stand for entries which lie elsewhere: what does not pass through dispatch reads a copy of these."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...compat.torch_dtensor import ask_subclass_of_dtensor, local_tensor


class ProxyTensor(Tensor):
    """A tensor of any shape without entries of its own; what it is for answers to `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return local_tensor(self.clone()).numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return local_tensor(self.clone()).tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        # One rank may print alone.
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class ProxyDTensor(ProxyTensor, DTensor):
    """Stands for entries of a `DTensor`, which takes no other kind of tensor for an operand."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ask_subclass_of_dtensor(cls)

    def to_local(self, **kwargs: Any) -> Tensor:
        return self.clone().to_local(**kwargs)  # type: ignore[attr-defined]

    def full_tensor(self, **kwargs: Any) -> Tensor:
        return self.clone().full_tensor(**kwargs)  # type: ignore[attr-defined]

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        return self.clone().redistribute(*args, **kwargs)  # type: ignore[attr-defined]
