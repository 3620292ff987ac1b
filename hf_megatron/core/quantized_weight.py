"""A linear's weight in few bits: a frozen parameter that linears multiply by, and nothing else reads as numbers.

It stands where the weight stood and is named as it was, so that modules, plans and PEFT find it; its storage holds
codes, whose shape and dtype mean nothing outside of this folder.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import UnsupportedError

# What looks at a parameter, or copies it as it is.
_PASSING = {
    *("__get__", "__set__", "__delete__", "__reduce_ex__", "__repr__", "__hash__", "__format__", "__len__"),
    *("clone", "to", "cpu", "cuda", "contiguous", "is_contiguous", "requires_grad_", "data_ptr", "size"),
    *("dim", "stride", "numel", "nelement", "element_size", "untyped_storage", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_shared", "as_subclass", "copy_", "__dir__", "has_names", "_is_view"),
    *("register_hook", "register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type", "record_stream"),
}


class QuantizedWeight(nn.Parameter):
    """A part of a weight `[local out, local in]` as codes; `F.linear` multiplies by what they stand for.

    Attributes:
        entries: of the whole weight.
        entries_in_one: how many a number of the storage stands for.
    """

    entries: int = 0
    entries_in_one: int = 1

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is linear:
            return _linear(*args, **(kwargs or {}))
        name = func.__name__
        if name == "detach":
            # It has no graph, and stays what it is in a state dict.
            return args[0]
        if name not in _PASSING:
            raise UnsupportedError(
                f"{name} of a quantised weight: its codes are no numbers. Linears multiply by it; everything else "
                "needs model.dequantize() first, or a model loaded without quantization_config."
            )
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def codes(self) -> Tensor:
        """The codes as a plain tensor of any shape."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def numel(self) -> int:
        """Counts the numbers that codes of the whole weight take, as parameters that are split count the whole's."""
        return self.entries // self.entries_in_one

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A quantised weight is pickled (torch.save of a state dict): its codes would go without what they are "
            "multiplied by. Save the adapter, or weights after model.dequantize()."
        )

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies `[..., local in]` by the weight and adds a bias `[local out]`: `[..., local out]`."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """Returns the weight `[local out, local in]` that the codes stand for."""
        raise NotImplementedError


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.project(x, bias)
