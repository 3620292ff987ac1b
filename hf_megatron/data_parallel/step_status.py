"""State of a model's optimizer steps: gradient checks of the current step, skipped steps, and who is notified."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import NonFiniteGradientError
from .finite_verdict import FiniteVerdict


@dataclass
class GradStatus:
    """Checks made on the gradients of one step before the optimizers use them.

    Attributes:
        clipped: whether the training loop clipped them.
        finite: whether all of them are finite, which the host may not know yet; `None` until all were checked.
        scaled: whether a loss scaler checked them; it then decides whether to step.
        used: whether an optimizer has stepped; another optimizer of the same model may follow.
    """

    clipped: bool = False
    finite: bool | FiniteVerdict | None = None
    scaled: bool = False
    used: bool = False


@dataclass
class StepCallbacks:
    """Functions that are called around the optimizer steps of one model.

    Attributes:
        guards: called before an optimizer takes the gradients; one that raises prevents the step.
        on_stepped: called after an optimizer step that was not skipped.
        on_cleared: called when the model's `zero_grad()` has cleared the gradients.
        on_discarded: called when gradients are discarded: cleared by the model or an optimizer, or skipped in a step.
        tell_skipped: whether `on_stepped` must not be called after a skipped step, so that the host has to know.
    """

    guards: list[Callable[[], None]] = field(default_factory=list)
    on_stepped: list[Callable[[], None]] = field(default_factory=list)
    on_cleared: list[Callable[[], None]] = field(default_factory=list)
    on_discarded: list[Callable[[], None]] = field(default_factory=list)
    tell_skipped: bool = False


class StepStatus:
    """Gradient status of the current step, and the number of skipped steps.

    Args:
        max_skipped_steps (`int`): skipped steps in a row after which an error is raised.
        describe_nonfinite (`Callable`): names the parameters whose gradients are not finite, for the error.

    Attributes:
        gradients (`GradStatus`): of the step that comes next.
    """

    def __init__(self, max_skipped_steps: int, describe_nonfinite: Callable[[], str]):
        self.max_skipped_steps, self.describe_nonfinite = max_skipped_steps, describe_nonfinite
        self.gradients = GradStatus()
        self._skipped_steps = 0
        self._skipped_in_a_row = 0
        # Verdicts on steps that are not counted yet.
        self._uncounted: list[FiniteVerdict] = []

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        self._count_late()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._count_late()
        self._skipped_steps = count

    def record_clipping(self, max_norm: float, *, is_finite: bool | FiniteVerdict, is_replicated: bool) -> None:
        """Records that the gradient norm was computed, and whether gradients were clipped to it.

        Args:
            max_norm (`float`): infinity if only the norm was asked for.
            is_finite (`bool` or `FiniteVerdict`): whether the norm is finite.
            is_replicated (`bool`): whether it is the norm of all gradients of the model, identical on all ranks.
        """
        gradients = self._open()
        gradients.clipped = gradients.clipped or math.isfinite(max_norm)
        # A finite norm of some parameters says nothing about the others; a non-finite one decides for all.
        if is_replicated or not is_finite:
            gradients.finite = is_finite

    def record_scaler(self) -> None:
        """Records that a loss scaler checked the gradients and decides whether to step."""
        self._open().scaled = True

    def _open(self) -> GradStatus:
        # The first check after a step opens the status of the next one.
        if self.gradients.used:
            self.gradients = GradStatus()
        return self.gradients

    def count(self, *, skipped: bool) -> None:
        """Counts a step; raises `NonFiniteGradientError` if too many in a row were skipped."""
        self._count_late()
        self._count(skipped=skipped)
        if skipped:
            self._reject_many()

    def count_later(self, verdict: FiniteVerdict) -> None:
        """Counts a step before the next one; raises as `count` for the steps before."""
        self._count_late()
        self._reject_many()
        self._uncounted.append(verdict)

    def _count_late(self) -> None:
        # The list is emptied first: reading the verdicts again would count them twice.
        verdicts, self._uncounted = self._uncounted, []
        for verdict in verdicts:
            self._count(skipped=not verdict)

    def _count(self, *, skipped: bool) -> None:
        self._skipped_steps += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0

    def _reject_many(self) -> None:
        # The decision to skip is identical on all ranks, so all of them raise together.
        if self._skipped_in_a_row >= self.max_skipped_steps:
            raise NonFiniteGradientError(
                f"{self.max_skipped_steps} consecutive optimizer steps were skipped because of a non-finite gradient "
                f"(MegatronConfig.max_skipped_steps = {self.max_skipped_steps}). On this rank "
                f"{self.describe_nonfinite()}."
            )
