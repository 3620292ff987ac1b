"""Where the gradients of a model are added up between two optimizer steps.

A `GradStore` is what a pipeline needs, which computes gradients before it knows their scale. There are two:
`PlainGradients` leaves them in `.grad`, the reducer (`reduction.py`) takes them out into buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import gradient_hooks
from ..compat.torch_dtensor import local_tensor


class GradStore(Protocol):
    """Sums of gradients that can be put aside and handed over.

    Attributes:
        synchronise: whether what a backward adds is reduced over the data parallel ranks.
        parameters: those whose gradients are added up here.
    """

    synchronise: bool
    parameters: list[nn.Parameter]

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added up since the last `zero_grad()`."""

    @property
    def waits_for_reduction(self) -> bool:
        """Whether backwards inside `no_sync` have left gradients."""

    @property
    def is_watched(self) -> bool:
        """Whether somebody has hooks on the gradients of these parameters."""

    def put_aside(self) -> Any:
        """Starts an empty sum beside the present one, which is returned."""

    def take_back(self, before: Any) -> Any:
        """Puts a sum back in place of the present one, which is returned."""

    def found(self, sums: Any) -> list[nn.Parameter]:
        """Lists the parameters that a sum may have gradients of."""

    def hand_over(self, sums: Any, factor: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Makes `factor` times a sum part of the present one, now or by what is returned.

        Args:
            factor (`float` or scalar `Tensor`): a tensor where the host would wait for its value.
            sums: returned by `take_back`; used up unless `keep`.

        Returns:
            for each of `found(sums)` what autograd has to add to it; `None` where nothing is left to add.
        """

    def reduce(self) -> None:
        """Starts the reduction of everything that is not reduced yet; every data parallel rank calls it."""

    def complete(self) -> None:
        """Waits for a reduction under way; every data parallel rank calls it."""

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes in gradients that were added to `.grad` without the parameters' hooks."""

    def hold(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        """Keeps what is added inside in `.grad` of these parameters; afterwards it joins the sum."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Makes backwards inside only add up their gradients."""


class PlainGradients:
    """The gradients of a model whose `.grad` is complete: one dp rank, or stage 3."""

    synchronise = True
    waits_for_reduction = False

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)

    @property
    def is_empty(self) -> bool:
        return all(parameter.grad is None for parameter in self.parameters)

    @property
    def is_watched(self) -> bool:
        return any(map(gradient_hooks, self.parameters))

    def put_aside(self) -> list[Tensor | None]:
        """Takes every gradient, of any shape, out of `.grad`."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return before

    def take_back(self, before: list[Tensor | None]) -> list[Tensor | None]:
        """Puts gradients of any shape in the place of the present ones, which are returned."""
        present = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return present

    def found(self, sums: list[Tensor | None]) -> list[nn.Parameter]:
        return [p for p, gradient in zip(self.parameters, sums, strict=True) if gradient is not None]

    @torch.no_grad()
    def hand_over(self, sums: list[Tensor | None], factor: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Returns `factor` times gradients of any shape: autograd adds them, and calls the parameters' hooks."""
        found = [gradient for gradient in sums if gradient is not None]
        if keep:
            return [gradient * factor for gradient in found]
        if isinstance(factor, Tensor) or factor != 1:
            for gradient in found:
                local_tensor(gradient).mul_(factor)
        return found

    def reduce(self) -> None:
        """Does nothing: nothing is reduced here."""

    def complete(self) -> None:
        """Does nothing: nothing is under way here."""

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: `.grad` is where gradients belong."""

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient in zip(parameters, before, strict=True):
                    if gradient is not None and parameter.grad is not None:
                        parameter.grad = gradient.add_(parameter.grad)
                    elif gradient is not None:
                        parameter.grad = gradient

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
