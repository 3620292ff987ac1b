"""The norm of a whole model's gradient from every rank's shards: each entry counted once."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..upstream import local_tensor


def _copies(tensor: Tensor, world: int) -> int:
    """How many ranks hold the same entries."""
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_replicate())


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm over all parameters that have a gradient, the same on every rank.

    Args:
        parameters: DTensors or plain tensors (taken as replicated over the world).
        norm_type (`float`, defaults to 2): any p of 1 or more, or infinity.

    Returns:
        `Tensor`: a scalar in fp32.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    world = dist.get_world_size()
    infinite = norm_type == math.inf
    device = gradients[0].device
    total = torch.zeros((), dtype=torch.float32, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        local = local_tensor(gradient)
        if local.numel():
            by_copies.setdefault(_copies(gradient, world), []).append(local)
    for copies, shards in by_copies.items():
        norms = torch.stack(torch._foreach_norm(shards, norm_type)).float()
        part = norms.max() if infinite else norms.pow(norm_type).sum() / copies
        total = torch.maximum(total, part) if infinite else total + part
    dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    return total if infinite else total.pow(1.0 / norm_type)


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their norm is at most `max_norm`; returns the norm before.

    Raises:
        ConfigError: a norm type below 1.
    """
    if norm_type < 1:
        raise ConfigError(f"clip_grad_norm: norm_type = {norm_type}; expected 1 or more, or infinity.")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = gradient_norm(parameters, norm_type)
    # The same formula as torch.nn.utils.clip_grad_norm_, so that clipped runs stay equal to one process.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
    return norm
