"""Gradients of a linear head and its input, accumulated over chunks of tokens."""

from typing import Any

import torch
from torch import Tensor


class HeadGradients:
    """Accumulates the gradients of `hidden`, `weight` and `bias`, the first three inputs of an autograd function.

    Args:
        needed: which of the three need a gradient.
        hidden (`Tensor`): `[tokens, hidden]`, or the logits themselves if there is no weight.
        weight (`Tensor`, *optional*): `[vocab / tp, hidden]`.
        bias (`Tensor`, *optional*): `[vocab / tp]`.
    """

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor | None, bias: Tensor | None):
        self.inputs = hidden, weight, bias
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        # Sums over many tokens: fp32.
        self.of_weight, self.of_bias = (
            torch.zeros_like(of, dtype=torch.float32) if is_needed and of is not None else None
            for is_needed, of in zip(needed[1:3], (weight, bias), strict=True)
        )

    def add(self, chunk: slice, gradient: Tensor, x: Tensor, w: Tensor | None) -> None:
        """Adds a chunk: logit gradient `[tokens, vocab / tp]`, input `x` and weight `w` in the dtype of the matmul."""
        # [tokens, hidden]: partial over the vocabulary, all-reduced by the `copy_to_ranks` that made `hidden`.
        if self.of_hidden is not None:
            self.of_hidden[chunk] = gradient if w is None else gradient @ w
        # [vocab / tp, hidden]: complete for this rank's vocabulary, no reduction over tp.
        if self.of_weight is not None:
            self.of_weight += gradient.t() @ x
        if self.of_bias is not None:
            self.of_bias += gradient.sum(0)

    def results(self) -> tuple[Any, ...]:
        """Returns the three gradients in the dtypes of their inputs."""
        gradients = (self.of_hidden, self.of_weight, self.of_bias)
        pairs = zip(gradients, self.inputs, strict=True)
        return tuple(None if one is None or of is None else one.to(of.dtype) for one, of in pairs)
