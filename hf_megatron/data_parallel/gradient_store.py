"""Where the gradients of a model are added up between two optimizer steps.

A `GradientStore` is what a pipeline needs, which computes gradients before it knows their scale. There are two:
`PlainGradients` leaves them in `.grad`, the reducer (`reduction.py`) takes them out into buckets.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..upstream import local_tensor


class GradientStore(Protocol):
    """Sums of gradients that can be put aside, scaled and added.

    Attributes:
        synchronise: whether what a backward adds is reduced over the data parallel ranks.
    """

    synchronise: bool

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added up since the last `zero_grad()`."""

    def put_aside(self) -> Any:
        """Starts an empty sum beside the present one, which is returned."""

    def take_back(self, before: Any) -> Any:
        """Puts a sum back in place of the present one, which is returned."""

    def add(self, other: Any, factor: float) -> None:
        """Adds `factor` times another sum; outside `no_sync` the result is reduced."""

    def scale(self, factor: float) -> None:
        """Multiplies the present sum."""

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

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters = list(parameters)

    @property
    def is_empty(self) -> bool:
        return all(parameter.grad is None for parameter in self._parameters)

    def put_aside(self) -> dict[int, Tensor | None]:
        """Takes every gradient, of any shape, out of `.grad`, by its parameter's identity."""
        before = {id(parameter): parameter.grad for parameter in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None
        return before

    def take_back(self, before: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
        """Puts gradients of any shape in the place of the present ones, which are returned."""
        present = self.put_aside()
        for parameter in self._parameters:
            parameter.grad = before[id(parameter)]
        return present

    @torch.no_grad()
    def add(self, other: dict[int, Tensor | None], factor: float) -> None:
        """Adds `factor` times gradients of any shape."""
        for parameter in self._parameters:
            gradient = other[id(parameter)]
            if gradient is None:
                continue
            local_tensor(gradient).mul_(factor)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_tensor(parameter.grad).add_(local_tensor(gradient))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(factor)

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
