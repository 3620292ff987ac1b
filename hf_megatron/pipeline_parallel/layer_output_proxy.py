"""What stands for the output of a layer that is not run, and sees what a model's loop takes of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

# Of hidden states: batch, sequence, hidden.
_DIMS = 3


def get_version(tensor: Tensor) -> int:
    """Counts the edits of a tensor of any shape; of one that was made in inference mode nobody counts them."""
    return 0 if tensor.is_inference() else tensor._version


class LayerOutputProxy(Tensor):
    """What a layer that is not run hands to the loop in a trial forward, and by what the next one knows it.

    Operators see a plain tensor, and its first entry is itself, for layers that return tuples.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    # Tells the boundary that its loop unpacks, and returns the values.
    unpacked: Callable[[], Any] | None = None
    # Tells it that the loop reads one value behind the first, by its place, and returns it.
    reads: Callable[[int], Any] | None = None

    def __iter__(self) -> Any:
        if self.dim() > _DIMS:
            return iter(self.as_subclass(Tensor))
        if self.unpacked is not None and (values := self.unpacked()) is not None:
            return iter(values)
        raise UnsupportedError(
            "The model's loop over its layers unpacks several values of each, of which a pipeline passes the hidden "
            "states on. Register a spec with their number as `layer_num_outputs`, or load it with pp_size=1."
        )

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or self.dim() > _DIMS:
            # Streams beside each other are taken apart.
            return self.as_subclass(Tensor)[index]
        if index > 0 and self.reads is not None:
            return self.reads(index)
        return self if index == 0 else iter(self)
