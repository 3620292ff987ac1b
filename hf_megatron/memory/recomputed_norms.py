"""Norms that keep their input alone, where stock ones keep copies of it in fp32 and their result before the weight."""

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..upstream import local_tensor
from .saved_tensors import may_pack


def is_norm(module: nn.Module) -> bool:
    """Tells whether a module is a norm that is written out in Python, and nothing else.

    torch's own norms keep their input only; what holds buffers may change them when it is computed.
    """
    written_out = not type(module).forward.__module__.startswith("torch.")
    is_leaf = next(module.children(), None) is None and next(module.buffers(), None) is None
    return "norm" in type(module).__name__.lower() and is_leaf and written_out


def recompute_norm(norm: nn.Module) -> None:
    """Makes the backward of a norm compute again what its forward made of its inputs, of any shape."""
    norm.__class__ = _recomputing(type(norm))  # type: ignore[arg-type]


@functools.cache
def _recomputing(base: Any) -> type[nn.Module]:
    @functools.wraps(base.forward)
    def forward(norm: Any, *args: Any, **kwargs: Any) -> Any:
        if not may_pack():
            return base.forward(norm, *args, **kwargs)
        # Weights are handed over for their version counters: checkpoint looks at those of its tensors in backward.
        weights = [local_tensor(parameter) for parameter in norm._parameters.values() if parameter is not None]

        def compute(count: int, *values: Any) -> Any:
            named = dict(zip(kwargs, values[count : count + len(kwargs)], strict=True))
            return base.forward(norm, *values[:count], **named)

        values = (*args, *kwargs.values(), *weights)
        return checkpoint(compute, len(args), *values, use_reentrant=False, preserve_rng_state=False)

    return type(base.__name__, (base,), {"forward": forward})
