"""Verdict whether a step's gradients are finite, which stays on the device while the host goes on."""

import torch
from torch import Tensor

from ..compat.torch_memory import LateCopy

# Fused optimizers that leave weights, state and step counts unchanged where the tensor `found_inf` is 1. SGD creates
# its momentum uninitialized, also in a step that is skipped.
_SKIP_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class FiniteVerdict:
    """Whether all gradients are finite; `bool()` of it waits until the device has computed it.

    Args:
        total (`Tensor`): scalar that is finite if all gradients are; the same on all ranks.

    Attributes:
        found_inf (`Tensor`): fp32 scalar for fused optimizers: 1 if a gradient is not finite, otherwise 0.
    """

    def __init__(self, total: Tensor):
        self.found_inf = torch.isfinite(total).logical_not().float()
        self._copy = LateCopy(self.found_inf)

    def __bool__(self) -> bool:
        return not self._copy.read()


def skips_on_device(optimizer: torch.optim.Optimizer, optimizer_class: type) -> bool:
    """Returns whether an optimizer takes the verdict as a tensor.

    Args:
        optimizer_class (`type`): class before it was prepared.
    """
    is_known = optimizer_class in _SKIP_ON_DEVICE or (
        optimizer_class is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    )
    return (
        is_known
        and all(group.get("fused") for group in optimizer.param_groups)
        # A loss scaler has its own verdict.
        and getattr(optimizer, "found_inf", None) is None
        and getattr(optimizer, "grad_scale", None) is None
    )
