"""Keys and values that are kept once, where attention saves them repeated for each of their query heads.

Models repeat them where a kernel cannot (sdpa with a mask). That a saved tensor is repeated is read from autograd's
graph: it is the copy of an expanded one.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.torch_autograd import pack_saved
from .saved_tensor_hooks import Kept, Packed, Version

_KERNELS = "ScaledDotProduct"
# What lies between a kernel and the linear that reads its output.
_MOVES = ("ViewBackward0", "UnsafeViewBackward0", "CloneBackward0", "TransposeBackward0")
# The expanded tensor with one dim more, its copy, and the view that joins the two dims.
_REPETITION = ("UnsafeViewBackward0", "CloneBackward0", "ExpandBackward0")


def keep_heads_once(x: Tensor) -> None:
    """Has the sdpa kernel that made `[..., heads * head_dim]` keep one of each key and value head; others are left."""
    node = x.grad_fn
    while node is not None and node.name() in _MOVES:
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith(_KERNELS):
        return
    for name, (source, _) in zip(("query", "key", "value"), node.next_functions, strict=False):
        repeated = _repeated_sizes(source)
        if repeated is not None:
            pack_saved(node, name, partial(_pack, repeated), lambda packed: packed.unpack())


def _repeated_sizes(node: Any) -> tuple[int, ...] | None:
    """Returns `(batch, heads, repetitions, sequence, head_dim)` of a node that repeats heads, `None` for others."""
    if node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    nodes = []
    for name in _REPETITION:
        if node is None or node.name() != name:
            return None
        nodes.append(node)
        node = node.next_functions[0][0]
    sizes, before = nodes[0]._saved_self_sym_sizes, nodes[-1]._saved_self_sym_sizes
    return sizes if len(sizes) == len(before) == 5 and before[2] == 1 else None


def _pack(sizes: tuple[int, ...], saved: Tensor) -> Packed:
    batch, heads, repetitions, *rest = sizes
    is_joined = saved.shape == (batch, heads * repetitions, *rest) and saved.is_contiguous()
    return _Repeated(saved, sizes) if is_joined else Kept(saved)


class _Repeated:
    """`[batch, heads * repetitions, sequence, head_dim]`, kept as the first of each head's repetitions."""

    def __init__(self, saved: Tensor, sizes: tuple[int, ...]):
        self._version, self._sizes = Version(saved), sizes
        self._heads = saved.view(sizes)[:, :, :1].clone()

    def unpack(self) -> Tensor:
        self._version.check()
        with torch.no_grad():
            return self._heads.expand(self._sizes).flatten(1, 2)
