"""Elementwise results that are recomputed in backward from tensors that autograd saves anyway.

In a gated MLP, the down projection saves `silu(gate) * up`, the product saves both of its factors, and silu saves
`gate`: four tensors of the MLP's width, although two are enough. The operation that produced a tensor is read from its
autograd node, so the model's forward need not be known.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_autograd import pack_saved, readable_saved
from ...compat.torch_memory import storage_key
from .saved_tensor_hooks import Packed, Remade, SavedInputs, Version

_PRODUCT = "MulBackward0"
_FACTORS = ("self", "other")
_ACTIVATIONS: Mapping[str, Callable[[Any], Tensor]] = {
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}


def run_recomputed(inputs: SavedInputs, matmul: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns `matmul(x)` of a linear, of any shape, which saves `x` for recomputation.

    If `x` was not produced by a known operation, or the operation's inputs are not saved, `x` itself is saved.
    """
    make = _computing(x.grad_fn)
    if make is None:
        return matmul(x)
    # An in-place change of `x` invalidates a saved view of it, but not a saved autocast copy.
    version, own_dtype = Version(x), x.dtype

    def form(dtype: torch.dtype, saved: Tensor) -> Packed:
        return Remade(version, make, saved) if dtype == own_dtype else Remade(None, lambda: make().to(dtype), saved)

    return inputs.run(matmul, x, storage_key(x), (), form)


def _computing(node: Any) -> Callable[[], Tensor] | None:
    """Returns a function that recomputes a node's result, or `None`; applies to a product's factors as well."""
    if node is None:
        return None
    if node.name() != _PRODUCT:
        return _computing_activation(node)
    for factor, (source, _) in zip(_FACTORS, node.next_functions, strict=True):
        if not _keep(node, factor, _computing_activation(source)):
            return None
    # The factors are read from the product's node in backward, which recomputes those that are activations.
    return lambda: node._saved_self * node._saved_other


def _computing_activation(node: Any) -> Callable[[], Tensor] | None:
    compute = None if node is None else _ACTIVATIONS.get(node.name())
    # The activation's own input is saved by its node in any case.
    if compute is None or readable_saved(node, "self") is None:
        return None
    return lambda: compute(node)


def _keep(node: Any, name: str, make: Callable[[], Tensor] | None) -> bool:
    """Sets how a node saves one of its tensors: as it is, or recomputed by `make`; `False` if it cannot be packed."""
    if make is None:
        return readable_saved(node, name) is not None
    return pack_saved(node, name, lambda saved: Remade(Version(saved), make, saved), Remade.unpack)
