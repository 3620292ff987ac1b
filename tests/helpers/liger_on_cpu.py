"""Liger's kernels on CPUs: its own modules, patches and autograd functions, with the Triton launches replaced.

The replacements compute the same in torch, and write to the same memory as the kernels do: the rotary embedding to its
inputs, the gated products to the tensors that they saved, RMSNorm to the gradient of its output.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def _write(target: Tensor, values: Tensor) -> Tensor:
    """Writes to a tensor's memory as a kernel does, which autograd does not see."""
    target.data.copy_(values)
    return target


def rms_norm_forward(x, weight, eps, offset, casting_mode, row_mode):
    """Normalizes the last dim of `x` `[..., hidden]`."""
    tokens = x.view(-1, x.shape[-1])
    inverse = torch.rsqrt(tokens.float().pow(2).mean(-1) + eps)
    normed = tokens.float() * inverse[:, None]
    normed = normed if weight is None else normed * (weight + offset)
    return normed.to(x.dtype).view(x.shape), tokens, inverse, x.shape[-1], 1, casting_mode


def rms_norm_backward(
    gradient, x, weight, inverse, offset, casting_mode, block_size, num_warps, in_place, row_mode, needs_dw=None
):
    """Returns the gradients of the input, in the memory of `gradient` if `in_place`, and of the weight."""
    flat = gradient.view(-1, gradient.shape[-1])
    scaled = flat if weight is None else flat * (weight + offset)
    normed = x.float() * inverse[:, None]
    of_input = inverse[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    of_weight = (flat * normed).sum(0) if weight is not None and needs_dw is not False else None
    target = flat if in_place else torch.empty_like(flat)
    return _write(target, of_input).view(gradient.shape), of_weight


def swiglu_forward(a, b, gate_multiplier=1.0):
    """Returns both inputs as `[tokens, features]`, and `silu(a) * b`."""
    result = F.silu(a * gate_multiplier) * b
    return a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1]), result


def swiglu_backward(a, b, gradient, gate_multiplier=1.0):
    """Returns the gradients of both inputs, in the inputs' memory."""
    flat, scaled = gradient.view(-1, gradient.shape[-1]), a * gate_multiplier
    sigmoid = torch.sigmoid(scaled)
    silu = scaled * sigmoid
    of_a, of_b = flat * (silu * (1 - sigmoid) + sigmoid) * b * gate_multiplier, flat * silu
    return _write(a, of_a).view(gradient.shape), _write(b, of_b).view(gradient.shape)


def geglu_forward(a, b):
    """Returns both inputs as `[tokens, features]`, and `gelu(a) * b`."""
    result = F.gelu(a, approximate="tanh") * b
    return a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1]), result


def geglu_backward(a, b, gradient):
    """Returns the gradients of both inputs, in the inputs' memory."""
    flat = gradient.view(-1, gradient.shape[-1])
    with torch.enable_grad():
        leaf = a.detach().clone().requires_grad_()
        gelu = F.gelu(leaf, approximate="tanh")
        (of_a,) = torch.autograd.grad(gelu, leaf, flat * b)
    of_b = flat * gelu.detach()
    return _write(a, of_a).view(gradient.shape), _write(b, of_b).view(gradient.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The kernel reads the memory as [batch, sequence, heads, dim], and copies it only if it has another order.
    heads = x.transpose(1, 2).contiguous()
    half = cos.shape[-1] // 2
    first, second = heads[..., :half].clone(), heads[..., half:].clone()
    cos, sin = cos[..., None, :half], sin[..., None, :half]
    return _write(heads, torch.cat((first * cos - second * sin, second * cos + first * sin), -1)).transpose(1, 2)


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Rotates queries and keys `[batch, heads, sequence, dim]` in their memory."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin), cos, sin


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Rotates the gradients of queries and keys back."""
    return _rotate(dq, cos, -sin), _rotate(dk, cos, -sin)


_KERNELS = {
    "rms_norm": (rms_norm_forward, rms_norm_backward),
    "swiglu": (swiglu_forward, swiglu_backward),
    "geglu": (geglu_forward, geglu_backward),
    "rope": (rope_forward, rope_backward),
}


@contextmanager
def liger_on_cpu() -> Iterator[None]:
    """Replaces Liger's kernels; restores everything that Liger replaces in transformers and torch afterwards."""
    import liger_kernel.transformers  # noqa: F401

    replaced = []
    for name, functions in _KERNELS.items():
        ops = importlib.import_module(f"liger_kernel.ops.{name}")
        replaced += [(ops, function.__name__, function) for function in functions]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    watched = [F, *(module for name, module in list(sys.modules.items()) if name.startswith("transformers.models."))]
    known = [(module, dict(vars(module))) for module in watched]
    classes = [
        (value, vars(value)["forward"])
        for _, names in known
        for value in names.values()
        if isinstance(value, type) and "forward" in vars(value)
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        for module, names in known:
            for name, value in names.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)
        for cls, forward in classes:
            if vars(cls)["forward"] is not forward:
                cls.forward = forward
