"""The gradients of a head and its input, added up over chunks of tokens."""

from typing import Any

import torch
from torch import Tensor


class HeadGradients:
    """Adds up what chunks of logits give to `hidden`, `weight` and `bias`, the first three inputs of a function.

    Args:
        needed: which of the three need a gradient.
        hidden (`Tensor`): `[tokens, hidden]`, or the logits themselves where there is no weight.
        weight (`Tensor`, *optional*): `[rows, hidden]`.
        bias (`Tensor`, *optional*): `[rows]`.
    """

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor | None, bias: Tensor | None):
        self.inputs = hidden, weight, bias
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        # Sums over many tokens.
        self.of_weight, self.of_bias = (
            torch.zeros_like(of, dtype=torch.float32) if is_needed and of is not None else None
            for is_needed, of in zip(needed[1:3], (weight, bias), strict=True)
        )

    def add(self, chunk: slice, gradient: Tensor, x: Tensor, w: Tensor | None) -> None:
        """Adds the gradient `[tokens, rows]` of the logits of a chunk: `x` times `w`, as the matmul had them."""
        if self.of_hidden is not None:
            self.of_hidden[chunk] = gradient if w is None else gradient @ w
        if self.of_weight is not None:
            self.of_weight += gradient.t() @ x
        if self.of_bias is not None:
            self.of_bias += gradient.sum(0)

    def results(self) -> tuple[Any, ...]:
        """Returns the three gradients in the dtypes of what they are of."""
        found = (self.of_hidden, self.of_weight, self.of_bias)
        pairs = zip(found, self.inputs, strict=True)
        return tuple(None if one is None or of is None else one.to(of.dtype) for one, of in pairs)
