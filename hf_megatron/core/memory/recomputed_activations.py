"""Elementwise results that are recomputed in backward from tensors that autograd saves anyway.

In a gated MLP, the down projection saves `silu(gate) * up`, the product saves both of its factors, and silu saves
`gate`: four tensors of the MLP's width, although two are enough. The operation that produced a tensor is read from its
autograd node, so the model's forward need not be known.
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
    """Returns the input for a linear, equal to `x` of any shape, and a context in which it is saved for recomputation.

    If `x` was not produced by a known operation, or the operation's inputs are not saved, `x` itself is saved.
    """
    make = _computing(x.grad_fn)
    if make is None:
        return x, nullcontext()
    # An in-place change of `x` invalidates a saved view of it, but not a saved autocast copy.
    version, own_dtype = Version(x), x.dtype

    def form(saved: Tensor, dtype: torch.dtype) -> Packed:
        return Remade(saved, version if dtype == own_dtype else None, lambda: make().to(dtype))

    return saved_as(x, form)


def _computing(node: Any) -> Callable[[], Tensor] | None:
    """Returns a function that recomputes a node's result, or `None`; applies to a product's factors as well."""
    if node is None:
        return None
    if node.name() != _PRODUCT:
        return _computing_activation(node)
    makers = [_computing_activation(source) for source, _ in node.next_functions]
    if all(_keep(node, factor, make) for factor, make in zip(_FACTORS, makers, strict=True)):
        # The factors are read from the product's node in backward, which recomputes those that are activations.
        return lambda: node._saved_self * node._saved_other
    return None


def _computing_activation(node: Any) -> Callable[[], Tensor] | None:
    compute = None if node is None else _ACTIVATIONS.get(node.name())
    if compute is None or not _keep(node, "self", None):
        return None
    # The activation's own input is saved by its node in any case.
    return lambda: compute(node)


def _keep(node: Any, name: str, make: Callable[[], Tensor] | None) -> bool:
    """Sets how a node saves one of its tensors: as it is, or recomputed by `make`; `False` if it cannot be packed."""

    def pack(saved: Tensor) -> Packed:
        return Kept(saved) if make is None else Remade(saved, Version(saved), make)

    return pack_saved(node, name, pack, lambda packed: packed.unpack())
