"""Gradients that stay in `.grad`, with what a pipeline asks of a store of gradients; the other one is the reducer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..upstream import local_tensor


class PlainGradients:
    """The gradients of a model whose `.grad` is complete: one dp rank, or stage 3."""

    synchronise = True

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters = list(parameters)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added up since the last `zero_grad()`."""
        return all(parameter.grad is None for parameter in self._parameters)

    def put_aside(self) -> dict[int, Tensor | None]:
        """Starts an empty sum beside the present one, which is returned."""
        before = {id(parameter): parameter.grad for parameter in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None
        return before

    def take_back(self, before: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
        """Puts a sum back in place of the present one, which is returned."""
        present = self.put_aside()
        for parameter in self._parameters:
            parameter.grad = before[id(parameter)]
        return present

    @torch.no_grad()
    def add(self, other: dict[int, Tensor | None], factor: float) -> None:
        """Adds `factor` times another sum."""
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
        """Multiplies the present sum."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(factor)

    def reduce(self) -> None:
        """Nothing is reduced here."""

    def complete(self) -> None:
        """Nothing is under way here."""

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients were added to `.grad` without the parameters' hooks: nothing to do here."""

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Inside, `.grad` of these parameters holds what was added inside; afterwards the sum."""
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        with torch.no_grad():
            for parameter, gradient in zip(parameters, before, strict=True):
                if gradient is not None and parameter.grad is not None:
                    parameter.grad = gradient.add_(parameter.grad)
                elif gradient is not None:
                    parameter.grad = gradient

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
