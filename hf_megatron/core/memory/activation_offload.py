"""What recomputed layers keep, their inputs, in CPU memory until backward (Bekman et al., 2025, "ALST").

With `recompute="full"` a layer keeps its input alone: tokens x hidden numbers, the last part of a row's memory that
grows with its length and the number of layers. Copies go to pinned memory, in the order of the device's own work.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...compat.instance_patches import mix_into
from ...compat.torch_memory import from_host, to_host
from .saved_tensor_hooks import Version


class _Kept:
    """A tensor of any shape in CPU memory."""

    def __init__(self, tensor: Tensor):
        self._device, self._version = tensor.device, Version(tensor)
        self._data = to_host(tensor)

    def unpack(self) -> Tensor:
        """Returns it on its device; raises where it was changed in place since."""
        self._version.check()
        return from_host(self._data, self._device)


def _pack(tensor: Tensor) -> Any:
    # Masks, positions and rotary tables are the same for all layers.
    return _Kept(tensor) if tensor.is_floating_point() and tensor.requires_grad else tensor


def _unpack(kept: Any) -> Tensor:
    return kept.unpack() if isinstance(kept, _Kept) else kept


class OffloadedInputs(nn.Module):
    """Stands in front of a layer's class: what a call saves around the recomputed part goes to CPU memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().__call__(*args, **kwargs)
        with saved_tensors_hooks(_pack, _unpack):
            return super().__call__(*args, **kwargs)


def offload_inputs(model: nn.Module, layers: str) -> None:
    """Has the layers of a model with `recompute="full"` keep their inputs in CPU memory; `layers` names their list."""
    for layer in model.get_submodule(layers).children():
        mix_into(layer, OffloadedInputs)
