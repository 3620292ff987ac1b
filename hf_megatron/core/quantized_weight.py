"""Quantized (4/8-bit) weight of a linear: a frozen parameter that only linears can read.

It replaces the original parameter under the same name, so that modules, plans and PEFT find it. Its storage holds
codes, whose shape and dtype are meaningful only to the quantization scheme.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import UnsupportedError

# Functions that inspect a parameter, or copy it without interpreting the codes.
_PASSING = {
    *("__get__", "__set__", "__delete__", "__reduce_ex__", "__repr__", "__hash__", "__format__", "__len__"),
    *("clone", "to", "cpu", "cuda", "contiguous", "is_contiguous", "requires_grad_", "data_ptr", "size"),
    *("dim", "stride", "numel", "nelement", "element_size", "untyped_storage", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_shared", "as_subclass", "copy_", "__dir__", "has_names", "_is_view"),
    *("register_hook", "register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type", "record_stream"),
}


class QuantizedWeight(nn.Parameter):
    """Local shard `[local out, local in]` of a quantized weight; `F.linear` multiplies by the dequantized values.

    Attributes:
        entries: number of entries of the full weight.
        entries_in_one: number of entries packed into one storage element.
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
            # A frozen parameter has no graph, and a state dict must keep its type.
            return args[0]
        if name not in _PASSING:
            raise UnsupportedError(
                f"{name} is not supported on a quantized weight, whose storage holds codes. Call model.dequantize() "
                "first, or load the model without quantization_config."
            )
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def codes(self) -> Tensor:
        """Codes as a plain tensor of any shape."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def numel(self) -> int:
        """Returns the number of storage elements of the full weight, as sharded parameters count the full tensor."""
        return self.entries // self.entries_in_one

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A quantized weight cannot be pickled (torch.save of a state dict): its codes would be saved without their "
            "scales. Save the adapter, or call model.dequantize() first."
        )

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Computes `x @ weight.T + bias`: `[..., local in]` -> `[..., local out]`, with a bias `[local out]`."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """Returns the dequantized weight `[local out, local in]`."""
        raise NotImplementedError


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.project(x, bias)
