"""Saves each key and value head once where attention would save it repeated for all of its query heads (GQA).

Models repeat heads if a kernel does not support GQA (sdpa with a mask). A repeated saved tensor is recognized from the
autograd graph: it is a copy of an expanded tensor.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.torch_autograd import pack_saved
from .saved_tensor_hooks import Kept, Packed, Version

_KERNELS = "ScaledDotProduct"
# Nodes between a kernel's output and the linear that reads it.
_MOVES = ("ViewBackward0", "UnsafeViewBackward0", "CloneBackward0", "TransposeBackward0")
# Backward order: the reshape that merges the two head dims, the copy, and the expand of `[batch, heads, 1, ...]`.
_REPETITION = ("UnsafeViewBackward0", "CloneBackward0", "ExpandBackward0")


def keep_heads_once(x: Tensor) -> None:
    """Deduplicates the repeated key and value heads saved by the sdpa kernel that produced `[..., heads * head_dim]`.

    Other tensors and kernels are left unchanged.
    """
    node = x.grad_fn
    while node is not None and node.name() in _MOVES:
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith(_KERNELS):
        return
    # The kernel's first three inputs are query, key and value, each [batch, heads, sequence, head_dim].
    for name, (source, _) in zip(("query", "key", "value"), node.next_functions, strict=False):
        repeated = _repeated_sizes(source)
        if repeated is not None:
            pack_saved(node, name, partial(_pack, repeated), lambda packed: packed.unpack())


def _repeated_sizes(node: Any) -> tuple[int, ...] | None:
    """Returns `(batch, heads, repetitions, sequence, head_dim)` of a node that repeats heads, otherwise `None`."""
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
    # Other views of the repeated heads are saved as they are.
    is_joined = saved.shape == (batch, heads * repetitions, *rest) and saved.is_contiguous()
    return _Repeated(saved, sizes) if is_joined else Kept(saved)


class _Repeated:
    """Saved `[batch, heads * repetitions, sequence, head_dim]`, stored without the repetitions."""

    def __init__(self, saved: Tensor, sizes: tuple[int, ...]):
        self._version, self._sizes = Version(saved), sizes
        # [batch, heads, 1, sequence, head_dim]
        self._heads = saved.view(sizes)[:, :, :1].clone()

    def unpack(self) -> Tensor:
        self._version.check()
        with torch.no_grad():
            # Copies the expanded heads into [batch, heads * repetitions, sequence, head_dim].
            return self._heads.expand(self._sizes).flatten(1, 2)
