"""Elementwise results that backward computes again from what autograd saves for them anyway.

The down projection of a gated MLP saves `silu(gate) * up`, that product saves both of its factors, and silu saves
`gate`: four tensors of the MLP's width, of which two are enough. Which operation made a tensor is read from its node in
autograd's graph, so nothing has to be known of the model's forward.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_autograd import pack_saved
from .saved_tensor_hooks import Kept, Packed, Remade, Version, saved_as

_PRODUCT = "MulBackward0"
_FACTORS = ("self", "other")
_ACTIVATIONS: Mapping[str, Callable[[Any], Tensor]] = {
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}


def recomputed_for(x: Tensor) -> tuple[Tensor, AbstractContextManager]:
    """Returns what a linear reads in place of `x`, of any shape, and a context in which it saves how `x` was made.

    Where no known operation made `x`, or what it was made of is not saved, `x` is saved as it is.
    """
    make = _computing(x.grad_fn)
    if make is None:
        return x, nullcontext()
    version, own_dtype = Version(x), x.dtype

    def form(saved: Tensor, dtype: torch.dtype) -> Packed:
        return Remade(saved, version if dtype == own_dtype else None, lambda: make().to(dtype))

    return saved_as(x, form)


def _computing(node: Any) -> Callable[[], Tensor] | None:
    """Returns what computes the result of a node again; a product keeps factors that are activations likewise."""
    if node is None:
        return None
    if node.name() != _PRODUCT:
        return _computing_activation(node)
    makers = [_computing_activation(source) for source, _ in node.next_functions]
    if all(_keep(node, factor, make) for factor, make in zip(_FACTORS, makers, strict=True)):
        return lambda: node._saved_self * node._saved_other
    return None


def _computing_activation(node: Any) -> Callable[[], Tensor] | None:
    compute = None if node is None else _ACTIVATIONS.get(node.name())
    if compute is None or not _keep(node, "self", None):
        return None
    return lambda: compute(node)


def _keep(node: Any, name: str, make: Callable[[], Tensor] | None) -> bool:
    """Has a node save one of its tensors as it is, or as what computes it; `False` where that is not possible."""

    def pack(saved: Tensor) -> Packed:
        return Kept(saved) if make is None else Remade(saved, Version(saved), make)

    return pack_saved(node, name, pack, lambda packed: packed.unpack())
