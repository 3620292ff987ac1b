"""Terms of a computed loss: its remainder without some of them, and the comparison of remainders over the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Training calls in which the losses of the ranks are compared.
CHECKED_CALLS = 3
# Relative difference between ranks, in units of the dtype's precision: losses that are computed from the same sums
# differ only by their rounding.
_TOLERANCE = 16


def subtract_terms(loss: Tensor, terms: Sequence[Tensor]) -> tuple[Tensor, list[float]]:
    """Returns a loss, a scalar, without some of its terms, and the factor by which each term counts.

    Factors are taken from autograd, whose graph is kept.

    Args:
        terms (`Sequence[Tensor]`): tensors of any shape from which the loss was computed.

    Returns:
        a scalar without a graph, and the mean factor of each term; 0 if the loss does not depend on it.
    """
    trained = [term for term in terms if term.requires_grad]
    gradients = iter(torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True) if trained else ())
    rest, factors = loss.detach().clone(), []
    for term in terms:
        gradient = next(gradients) if term.requires_grad else None
        factors.append(0.0 if gradient is None else float(gradient.mean()))
        if gradient is not None:
            rest -= (gradient * term.detach()).sum()
    return rest, factors


def differ_between_ranks(values: Sequence[float], *, scale: float, precision: float) -> bool:
    """Returns whether values of several ranks differ by more than rounding.

    Args:
        scale (`float`): largest loss of the ranks, from which the values were computed.
        precision (`float`): of the loss's dtype.
    """
    return max(values) - min(values) > _TOLERANCE * precision * scale
