"""Terms of a computed loss: what is left of it without them, and the factor by which each counts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def subtract_terms(loss: Tensor, terms: Sequence[Tensor]) -> tuple[Tensor, list[float]]:
    """Returns a loss, a scalar, without some of its terms, and the factor by which each term counts.

    Factors are taken from autograd, whose graph is kept.

    Args:
        terms (`Sequence[Tensor]`): tensors of any shape from which the loss was computed.

    Returns:
        a scalar without a graph, and the mean factor of each term; 0 if the loss does not depend on it.
    """
    used = [term for term in terms if term.requires_grad]
    gradients = torch.autograd.grad(loss, used, retain_graph=True, allow_unused=True) if used else ()
    by_term = {id(term): gradient for term, gradient in zip(used, gradients, strict=True)}
    rest, factors = loss.detach().clone(), []
    for term in terms:
        gradient = by_term.get(id(term))
        factors.append(0.0 if gradient is None else float(gradient.mean()))
        if gradient is not None:
            rest -= (gradient * term.detach()).sum()
    return rest, factors
