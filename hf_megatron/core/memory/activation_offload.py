"""CPU offload of the inputs that recomputed layers keep until backward (Bekman et al., 2025, "ALST").

With `recompute="full"` a layer saves only its input, `[batch, sequence, hidden]`: the last activations whose memory
grows with both sequence length and number of layers. They are copied to pinned memory in the order of the device's
stream.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...compat.instance_patches import mix_into
from ...compat.torch_memory import from_host, to_host
from .saved_tensor_hooks import Version


class _Kept:
    """Saved tensor of any shape, stored in CPU memory."""

    def __init__(self, tensor: Tensor):
        self._device, self._version = tensor.device, Version(tensor)
        self._data = to_host(tensor)

    def unpack(self) -> Tensor:
        """Returns the tensor on its device; raises if the original was modified in place since."""
        self._version.check()
        return from_host(self._data, self._device)


def _pack(tensor: Tensor) -> Any:
    # Only tensors that require grad: masks, positions and rotary tables are shared by all layers.
    return _Kept(tensor) if tensor.is_floating_point() and tensor.requires_grad else tensor


def _unpack(kept: Any) -> Tensor:
    return kept.unpack() if isinstance(kept, _Kept) else kept


class OffloadedInputs(nn.Module):
    """Mixin for a layer: tensors that a call saves outside the recomputed region are offloaded to CPU memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().__call__(*args, **kwargs)
        # Inside the recomputed region checkpoint's own hooks take precedence; these see only the layer's inputs.
        with saved_tensors_hooks(_pack, _unpack):
            return super().__call__(*args, **kwargs)


def offload_inputs(model: nn.Module, layers: str) -> None:
    """Offloads the inputs of a model's layers with `recompute="full"`; `layers` is the name of the layer list."""
    for layer in model.get_submodule(layers).children():
        mix_into(layer, OffloadedInputs)
