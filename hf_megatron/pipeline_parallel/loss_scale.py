"""How much the losses of a pipelined model count, and where the gradients of a schedule go until that is known.

A schedule computes gradients while it computes the loss; what the loss is multiplied by comes with `backward()`. A loop
that knows the factor announces it, and gradients go straight into the model's sums. Else a schedule starts from a
guess: the sums are scaled afterwards while nothing else is in them, and a schedule that finds gradients of others there
keeps its own sums until backward has told.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..data_parallel.gradient_store import GradientStore
from ..errors import ConfigError
from .schedules import Action, Kind

# An announced scale and the one that arrives are rounded differently, to fp32 at every factor.
_SAME_SCALE = 1e-6


class LossScale:
    """What is known of the factors that losses of one model receive in backward.

    Args:
        usual (`Callable`): a guess for the first loss; later ones are taken to receive what the last one did.
    """

    def __init__(self, usual: Callable[[], float]):
        self.usual = usual
        self.announced: Callable[[], float] | None = None
        self._last: float | None = None
        self._calls = 0
        # Schedules whose gradients are in the sums although nobody has called backward.
        self._unsettled: set[int] = set()
        # The one whose gradients are alone in the sums.
        self._alone: ScheduledGradients | None = None

    @contextmanager
    def announce(self, scale: Callable[[], float] | None) -> Iterator[None]:
        """Lets a loop tell what the next losses, inside, receive."""
        before, self.announced = self.announced, scale
        try:
            yield
        finally:
            self.announced = before

    def expected(self) -> float:
        """Returns what the next loss will receive, as far as anybody knows."""
        if self.announced is not None:
            return self.announced()
        return self.usual() if self._last is None else self._last

    def clear(self) -> None:
        """Forgets who waits for a scale: the gradients are gone."""
        self._unsettled.clear()

    def require_settled(self, store: GradientStore) -> None:
        """Raises `ConfigError` if the gradients of a forward would be used that nobody called backward for."""
        if self._unsettled and not store.is_empty:
            raise ConfigError(
                "optimizer.step() after a training forward of a pipelined model whose loss was never backpropagated: "
                "its gradients exist already. Compute losses that are not trained on under torch.no_grad(), or call "
                "zero_grad() after them."
            )

    # For schedules

    def begin(self, gradients: "ScheduledGradients", *, sums_are_empty: bool, is_known: bool) -> tuple[int, bool]:
        """Returns a schedule's number, and whether its gradients may go straight into the sums."""
        self._calls += 1
        if sums_are_empty:
            self.clear()
            self._alone = gradients
        is_direct = self._alone is gradients or (is_known and self.waited_for() is None)
        if is_direct and self._alone is not gradients:
            self._alone = None
        return self._calls, is_direct

    def is_alone(self, gradients: "ScheduledGradients") -> bool:
        """Tells whether nothing but these gradients is in the sums, which may be scaled then."""
        return self._alone is gradients

    def waited_for(self) -> "ScheduledGradients | None":
        """Returns the schedule whose gradients are alone in the sums, at a scale that is not known yet."""
        alone = self._alone
        return alone if alone is not None and alone.is_guess and alone.number in self._unsettled else None

    def is_unsettled(self, number: int) -> bool:
        return number in self._unsettled

    def await_backward(self, number: int) -> None:
        """Notes that the gradients of a schedule are in the sums now."""
        self._unsettled.add(number)

    def settled(self, number: int, scale: float | None) -> None:
        """Notes a schedule's scale, which backward has told; `None` where the next loss need not receive the same."""
        self._unsettled.discard(number)
        if scale is not None and math.isfinite(scale) and scale:
            self._last = scale


class ScheduledGradients:
    """Where the gradients of one schedule go.

    Args:
        seed (`float`, *optional*): what the backward of each microbatch starts from, where it is known: a reverse
            pipeline is given gradients that are scaled already.
        tied: parameters that the other end of the pipeline holds too.
        sum_tied (`Callable`): adds up their gradients over both ends.
    """

    def __init__(
        self,
        scale: LossScale,
        store: GradientStore,
        actions: tuple[Action, ...],
        *,
        tied: list[nn.Parameter],
        sum_tied: Callable[[], None],
        seed: float | None = None,
    ):
        self.scale, self.store, self.tied, self.sum_tied = scale, store, tied, sum_tied
        # Each stage's last action that adds gradients to its parameters.
        last = {a.stage: a for a in actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        self.final = frozenset(last.values())
        self.is_reverse = seed is not None
        self.is_guess = seed is None and scale.announced is None
        self.number, self.is_direct = scale.begin(self, sums_are_empty=store.is_empty, is_known=not self.is_guess)
        self.seed = scale.expected() if seed is None else seed
        self._settled = False
        self._sums: Any = None
        self._waiting: list[tuple[Any, float]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Holds the store as the schedule's backwards, which run inside, need it."""
        self.synchronise = self.store.synchronise
        self.store.complete()
        with ExitStack() as stack:
            stack.callback(setattr, self.store, "synchronise", self.synchronise)
            if not self.is_direct:
                before = self.store.put_aside()
                stack.callback(lambda: setattr(self, "_sums", self.store.take_back(before)))
                stack.enter_context(self.store.no_sync())
            with self.store.hold(self.tied):
                if self.is_direct:
                    self.scale.await_backward(self.number)
                try:
                    yield
                    self.sum_tied()
                finally:
                    self.store.synchronise = self.synchronise and self.is_direct and not self.is_reverse

    def before_backward(self, action: Action) -> None:
        """Lets reduction over dp ranks begin with the last microbatch of a stage."""
        is_last = self.is_direct and not self.is_reverse and action in self.final
        self.store.synchronise = self.synchronise and is_last

    def settle(self, scale: float) -> None:
        """Takes the scale of the gradients, as backward tells it.

        Raises `ConfigError` where they are mixed with others already, at another scale.
        """
        if self._settled or (self.is_direct and not self.scale.is_unsettled(self.number)):
            raise ConfigError(
                "The loss of a pipelined model was backpropagated twice, or after zero_grad() or a later step: its "
                "gradients are no longer there."
            )
        self._settled = True
        self.scale.settled(self.number, None if self.is_reverse else scale)
        if not self.is_direct:
            sums, self._sums = (self._sums, scale / self.seed), None
            first = self.scale.waited_for()
            if first is None:
                self.store.add(*sums)
            else:
                first._waiting.append(sums)
        elif not math.isclose(scale, self.seed, rel_tol=_SAME_SCALE):
            if not self.scale.is_alone(self):
                raise ConfigError(
                    f"The loss received the gradient {scale}, the loop announced {self.seed}: this step's gradients "
                    "are added up already. Set `pipeline.loss_scale.announced = None`."
                )
            self.store.scale(scale / self.seed)
        while self._waiting:
            self.store.add(*self._waiting.pop(0))
