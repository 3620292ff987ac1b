"""How much the losses of a pipelined model count, and where the gradients of a schedule go until that is known.

A schedule computes gradients while it computes the loss; what the loss is multiplied by comes with `backward()`. Until
then the gradients are kept apart: nobody sees those of a loss that was not backpropagated, and no `zero_grad()` in
between touches them. Where a loop has announced the factor and sums are there already, gradients are added straight to
them: a second buffer is saved.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..compat.torch_autograd import without_gradient_hooks
from ..compat.torch_memory import check_soon
from ..data_parallel.grad_store import GradStore
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
        self._was_wrong = self._was_right = False
        # Schedules whose gradients are among the model's sums although nobody has called backward.
        self._unsettled: set[ScheduledGradients] = set()

    @contextmanager
    def announce(self, scale: Callable[[], float] | None) -> Iterator[None]:
        """Lets a loop tell what the next losses, inside, receive."""
        before, self.announced = self.announced, scale
        try:
            yield
        finally:
            self.announced = before

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Learns nothing of the losses inside, which no loop has announced."""
        before = dict(vars(self))
        self.announced = None
        try:
            yield
        finally:
            vars(self).update(before)

    def expected(self) -> float:
        """Returns what the next loss will receive, as far as anybody knows."""
        if self.announced is not None and not self._was_wrong:
            return self.announced()
        return self.usual() if self._last is None else self._last

    def is_known(self) -> bool:
        """Tells whether a loop has announced what the next loss receives; one that was wrong is not believed again."""
        return self.announced is not None and not self._was_wrong

    def clear(self) -> None:
        """Forgets who waits for a scale: the gradients are gone."""
        self._unsettled.clear()

    def require_settled(self, store: GradStore) -> None:
        """Raises `ConfigError` if the gradients of a forward would be used that nobody called backward for."""
        if self._unsettled and not store.is_empty:
            raise ConfigError(
                "optimizer.step() after a training forward of a pipelined model whose loss was never backpropagated: "
                "its gradients were added to others already, as the loop has announced. Compute losses that are not "
                "trained on under torch.no_grad()."
            )

    # For schedules

    def await_backward(self, gradients: "ScheduledGradients") -> None:
        """Notes that the gradients of a schedule are among the model's sums now."""
        self._unsettled.add(gradients)

    def is_unsettled(self, gradients: "ScheduledGradients") -> bool:
        return gradients in self._unsettled

    def is_unproven(self, gradients: "ScheduledGradients") -> bool:
        """Tells whether a loop has announced the scale of a schedule and nobody has seen yet that it was right."""
        return gradients.was_announced and not self._was_right

    def settled(self, gradients: "ScheduledGradients", scale: "float | Tensor") -> None:
        """Notes a schedule's scale, which backward has told; a scalar tensor's value is not known."""
        self._unsettled.discard(gradients)
        if isinstance(scale, Tensor):
            return
        if gradients.was_announced:
            self._was_right = math.isclose(scale, gradients.seed, rel_tol=_SAME_SCALE)
            self._was_wrong = self._was_wrong or not self._was_right
        if math.isfinite(scale) and scale:
            self._last = scale


class ScheduledGradients:
    """Where the gradients of one schedule go.

    Args:
        tied: parameters that the other end of the pipeline holds too.
        sum_tied (`Callable`): adds up their gradients over both ends.
        is_direct (`bool`): whether they go straight into the model's sums.

    Attributes:
        seed (`float`): what the backward of each microbatch starts from.
    """

    def __init__(
        self,
        scale: LossScale,
        store: GradStore,
        actions: tuple[Action, ...],
        *,
        tied: list[nn.Parameter],
        sum_tied: Callable[[], None],
        seed: float,
        is_direct: bool,
    ):
        self.scale, self.store, self.tied, self.sum_tied = scale, store, tied, sum_tied
        # Each stage's last action that adds gradients to its parameters.
        last = {a.stage: a for a in actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        self.final = frozenset(last.values())
        self.seed, self.is_direct, self.was_announced = seed, is_direct, scale.is_known()
        self.synchronise = store.synchronise
        self._reduces = False
        self._sums: Any = None

    @classmethod
    def before_backward_of(cls, scale: LossScale, store: GradStore, *args: Any, **kwargs: Any) -> Any:
        """Prepares for a schedule that runs before its loss is backpropagated; arguments as for the class."""
        # Hooks have to see the whole gradient; an empty store takes over what was kept apart as it is.
        is_direct = scale.is_known() and not store.is_empty and not store.is_watched
        gradients = cls(scale, store, *args, seed=scale.expected(), is_direct=is_direct, **kwargs)
        if is_direct:
            scale.await_backward(gradients)
        return gradients

    @contextmanager
    def collecting(self, *, reduces: bool = True) -> Iterator[None]:
        """Holds the store as the schedule's backwards, which run inside, need it.

        Args:
            reduces (`bool`, defaults to `True`): over dp ranks, where the store does; else that is left for later.
        """
        store = self.store
        store.complete()
        # Gradients that wait for their reduction are reduced together with these.
        self._reduces = reduces and self.synchronise and (self.is_direct or not store.waits_for_reduction)
        with ExitStack() as stack:
            stack.callback(setattr, store, "synchronise", self.synchronise)
            if not self.is_direct:
                before = store.put_aside()
                stack.callback(lambda: setattr(self, "_sums", store.take_back(before)))
                stack.enter_context(without_gradient_hooks(store.parameters if store.is_watched else ()))
            store.synchronise = False
            with store.hold(self.tied):
                yield
                self.sum_tied()
                store.synchronise = self._reduces
            if not self.is_direct:
                store.complete()

    def before_backward(self, action: Action) -> None:
        """Lets reduction over dp ranks begin with the last microbatch of a stage."""
        self.store.synchronise = self._reduces and action in self.final

    def reached(self) -> list[nn.Parameter]:
        """Lists the parameters whose gradients are asked of the loss."""
        return self.store.parameters if self.is_direct else self.store.found(self._sums)

    def settle(self, scale: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Takes the scale of the gradients, as backward tells it.

        Args:
            scale (`float` or scalar `Tensor`): a tensor where the host would wait for its value.
            keep (`bool`): whether the loss may be backpropagated once more.

        Returns:
            what autograd has to add to each of `reached()`.

        Raises:
            ConfigError: the gradients are no longer there, or among others already at another scale.
        """
        if self._sums is None and not self.scale.is_unsettled(self):
            raise ConfigError(
                "The loss of a pipelined model was backpropagated twice: its gradients are no longer there. Call the "
                "first backward with retain_graph=True."
            )
        self.scale.settled(self, scale)
        if self.is_direct:
            error = ConfigError(
                f"The loss received the gradient {scale}, the loop announced {self.seed}: this step's gradients "
                "are added up already. Set `pipeline.loss_scale.announced = None`."
            )
            if isinstance(scale, Tensor):
                check_soon((scale - self.seed).abs() <= _SAME_SCALE * abs(self.seed), lambda: error)
            elif not math.isclose(scale, self.seed, rel_tol=_SAME_SCALE):
                raise error
            return [None] * len(self.store.parameters)
        handed_over = self.hand_over(scale / self.seed, keep=keep)
        if not self._reduces and self.store.synchronise:
            self.store.reduce()
        return handed_over

    def hand_over(self, factor: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Makes the gradients that were kept apart part of the sums; see `GradStore.hand_over`."""
        sums = self._sums
        if not keep:
            self._sums = None
        return self.store.hand_over(sums, factor, keep=keep)
