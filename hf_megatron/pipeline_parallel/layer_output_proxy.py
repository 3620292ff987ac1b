"""Proxy for the output of a layer that is not run; records which outputs the model's layer loop reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

# Number of dims of hidden states: batch, sequence, hidden.
_DIMS = 3


def get_version(tensor: Tensor) -> int:
    """Returns the version counter of a tensor of any shape; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


class LayerOutputProxy(Tensor):
    """Hidden states `[batch, sequence, hidden]` that a skipped layer returns to the loop in a trial forward.

    Operators see a plain tensor. Indexing with 0 returns the proxy itself, for layers that return tuples.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    # Called when the loop unpacks the output; returns the values, or `None` if their number is unknown.
    unpacked: Callable[[], Any] | None = None
    # Called when the loop reads an output after the first one by its index; returns it.
    reads: Callable[[int], Any] | None = None

    def __iter__(self) -> Any:
        if self.dim() > _DIMS:
            return iter(self.as_subclass(Tensor))
        if self.unpacked is not None and (values := self.unpacked()) is not None:
            return iter(values)
        raise UnsupportedError(
            "The model's loop over its layers unpacks several outputs of each layer, but a pipeline sends hidden "
            "states only. Register a spec with their number as `layer_num_outputs`, or load the model with pp_size=1."
        )

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or self.dim() > _DIMS:
            # Hyper-connection streams, [streams, batch, sequence, hidden], are indexed like a plain tensor.
            return self.as_subclass(Tensor)[index]
        if index > 0 and self.reads is not None:
            return self.reads(index)
        return self if index == 0 else iter(self)
