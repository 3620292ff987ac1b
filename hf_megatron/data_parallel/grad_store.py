"""Storage of the gradients that accumulate between two optimizer steps.

A pipeline computes gradients before it knows their scale, so it needs a store that can stash and add them. There are
two: `PlainGradients` leaves gradients in `.grad`; `GradientReducer` moves them into buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import gradient_hooks
from ..compat.torch_dtensor import local_tensor


class GradStore(Protocol):
    """Accumulated gradients that can be stashed and added.

    Attributes:
        synchronize: whether gradients that a backward accumulates are reduced over the data-parallel ranks.
        parameters: the parameters whose gradients are stored here.
    """

    synchronize: bool
    parameters: list[nn.Parameter]

    @property
    def is_empty(self) -> bool:
        """Whether no gradient was accumulated since the last `zero_grad()`."""

    @property
    def waits_for_reduction(self) -> bool:
        """Whether backwards inside `no_sync` have left gradients."""

    @property
    def has_user_hooks(self) -> bool:
        """Whether the user has hooks on the gradients of these parameters."""

    def stash(self) -> Any:
        """Takes the accumulated gradients out and returns them; the store is empty afterwards."""

    def unstash(self, stashed: Any) -> Any:
        """Restores stashed gradients in exchange for the accumulated ones, which are returned."""

    def parameters_with_grad(self, gradients: Any) -> list[nn.Parameter]:
        """Returns the parameters that stashed gradients may belong to."""

    def flush(self, gradients: Any, factor: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Adds `factor` times stashed gradients to the accumulated ones, directly or through autograd.

        Args:
            gradients: returned by `unstash`; used up unless `keep`.
            factor (`float` or scalar `Tensor`): a tensor where the host would wait for its value.
            keep (`bool`): whether the gradients may be flushed again.

        Returns:
            the tensors, one per entry of `parameters_with_grad(gradients)`, that autograd has to add; `None` for those
            that are added already.
        """

    def reduce(self) -> None:
        """Starts the reduction of all gradients that are not reduced yet; collective over data-parallel ranks."""

    def complete(self) -> None:
        """Waits for a reduction in flight; collective over data-parallel ranks."""

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes in gradients that were added to `.grad` without the parameters' hooks."""

    def hold(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        """Leaves gradients of these parameters in `.grad` inside, and takes them in afterwards."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulates gradients of backwards inside without reducing them."""


class PlainGradients:
    """Gradients in `.grad` that need no reduction here: one data-parallel rank, or ZeRO stage 3."""

    synchronize = True
    waits_for_reduction = False

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)

    @property
    def is_empty(self) -> bool:
        return all(parameter.grad is None for parameter in self.parameters)

    @property
    def has_user_hooks(self) -> bool:
        return any(map(gradient_hooks, self.parameters))

    def stash(self) -> list[Tensor | None]:
        """Takes all gradients, of any shape, out of `.grad`."""
        stashed = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return stashed

    def unstash(self, stashed: list[Tensor | None]) -> list[Tensor | None]:
        """Restores stashed gradients of any shape in `.grad`; returns the present ones."""
        present = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, stashed, strict=True):
            parameter.grad = gradient
        return present

    def parameters_with_grad(self, gradients: list[Tensor | None]) -> list[nn.Parameter]:
        return [p for p, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None]

    @torch.no_grad()
    def flush(self, gradients: list[Tensor | None], factor: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Returns `factor` times the gradients, of any shape: autograd adds them and calls the parameters' hooks."""
        present = [gradient for gradient in gradients if gradient is not None]
        if keep:
            # The stashed tensors may be flushed again: scale copies.
            return [gradient * factor for gradient in present]
        # A tensor factor is always applied: comparing it with 1 would make the host wait for the device.
        if isinstance(factor, Tensor) or factor != 1:
            for gradient in present:
                local_tensor(gradient).mul_(factor)
        return present

    def reduce(self) -> None:
        """Does nothing: these gradients are not reduced here."""

    def complete(self) -> None:
        """Does nothing: no reduction is in flight."""

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: gradients stay in `.grad`."""

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        # `.grad` is empty inside, so that afterwards it holds the new gradient only, which the caller may sum over
        # pipeline ranks before it is added to the earlier one.
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
