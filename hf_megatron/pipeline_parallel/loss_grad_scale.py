"""Gradient scale of a pipelined model's losses, and storage of a schedule's gradients until the scale is known.

A schedule computes gradients while it computes the loss; the factor that the loss is multiplied by arrives with
`backward()`. Until then the gradients are stashed: a loss that is never backpropagated leaves no gradients, and a
`zero_grad()` in between does not touch them. If the training loop has announced the factor and gradients have
accumulated already, they are added directly, which saves a second buffer.
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
    """Expected gradient of a model's next loss.

    Args:
        usual (`Callable`): returns a guess for the first loss; later losses are expected to receive the last scale.
    """

    def __init__(self, usual: Callable[[], float]):
        self.usual = usual
        self.announced: Callable[[], float] | None = None
        self._last: float | None = None
        self._was_wrong = self._was_right = False
        # Schedules whose gradients were accumulated before their loss was backpropagated.
        self._pending: set[ScheduledGradients] = set()

    @contextmanager
    def announce(self, scale: Callable[[], float] | None) -> Iterator[None]:
        """Announces the gradient that losses inside will receive."""
        before, self.announced = self.announced, scale
        try:
            yield
        finally:
            self.announced = before

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Leaves the state unchanged by losses inside, which were not announced."""
        before = dict(vars(self))
        self.announced = None
        try:
            yield
        finally:
            vars(self).update(before)

    def expected(self) -> float:
        """Returns the expected gradient of the next loss."""
        if self.announced is not None and not self._was_wrong:
            return self.announced()
        return self.usual() if self._last is None else self._last

    def is_known(self) -> bool:
        """Returns whether the next loss's gradient was announced; after a wrong announcement, none is trusted."""
        return self.announced is not None and not self._was_wrong

    def clear(self) -> None:
        """Forgets pending schedules: their gradients were discarded."""
        self._pending.clear()

    def require_final(self, store: GradStore) -> None:
        """Raises `ConfigError` if a step would use gradients of a loss that was not backpropagated."""
        if self._pending and not store.is_empty:
            raise ConfigError(
                "optimizer.step() after a training forward of a pipelined model whose loss was never backpropagated: "
                "its gradients were accumulated during the forward. Compute losses that are not trained on under "
                "torch.no_grad()."
            )

    # For schedules

    def await_backward(self, gradients: "ScheduledGradients") -> None:
        """Records a schedule whose gradients are accumulated before its backward."""
        self._pending.add(gradients)

    def is_pending(self, gradients: "ScheduledGradients") -> bool:
        """Returns whether a schedule's gradients are accumulated and wait for its backward."""
        return gradients in self._pending

    def is_unproven(self, gradients: "ScheduledGradients") -> bool:
        """Returns whether a schedule's scale was announced and no announcement was confirmed yet."""
        return gradients.was_announced and not self._was_right

    def record(self, gradients: "ScheduledGradients", scale: "float | Tensor") -> None:
        """Records the scale that backward gave a schedule; the value of a scalar tensor is not read."""
        self._pending.discard(gradients)
        if isinstance(scale, Tensor):
            return
        if gradients.was_announced:
            self._was_right = math.isclose(scale, gradients.seed, rel_tol=_SAME_SCALE)
            self._was_wrong = self._was_wrong or not self._was_right
        if math.isfinite(scale) and scale:
            self._last = scale


class ScheduledGradients:
    """Gradients of one schedule.

    Args:
        tied: parameters that the other end of the pipeline holds too.
        sum_tied (`Callable`): sums their gradients over both ends.
        seed (`float`): gradient of each microbatch's loss.
        is_direct (`bool`): whether gradients are accumulated in the store at once instead of stashed.
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
        # The last action of each stage that adds gradients to its parameters.
        last = {a.stage: a for a in actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        self.final = frozenset(last.values())
        self.seed, self.is_direct, self.was_announced = seed, is_direct, scale.is_known()
        self.synchronize = store.synchronize
        self._reduces = False
        self._stashed: Any = None

    @classmethod
    def for_training(cls, scale: LossScale, store: GradStore, *args: Any, **kwargs: Any) -> Any:
        """Prepares for a schedule that runs before its loss is backpropagated; other arguments as for the class."""
        # User hooks have to see the complete gradient; an empty store takes a stashed buffer over without a copy.
        is_direct = scale.is_known() and not store.is_empty and not store.has_user_hooks
        gradients = cls(scale, store, *args, seed=scale.expected(), is_direct=is_direct, **kwargs)
        if is_direct:
            scale.await_backward(gradients)
        return gradients

    @contextmanager
    def collecting(self, *, reduces: bool = True) -> Iterator[None]:
        """Prepares the store for the schedule's backwards, which run inside.

        Args:
            reduces (`bool`, defaults to `True`): whether to reduce over data-parallel ranks if the store does.
        """
        store = self.store
        store.complete()
        # Gradients of earlier `no_sync` backwards are reduced together with these, later.
        self._reduces = reduces and self.synchronize and (self.is_direct or not store.waits_for_reduction)
        with ExitStack() as stack:
            stack.callback(setattr, store, "synchronize", self.synchronize)
            if not self.is_direct:
                before = store.stash()
                stack.callback(lambda: setattr(self, "_stashed", store.unstash(before)))
                stack.enter_context(without_gradient_hooks(store.parameters if store.has_user_hooks else ()))
            store.synchronize = False
            # Gradients of tied weights stay in `.grad` until both ends have summed them.
            with store.hold(self.tied):
                yield
                self.sum_tied()
                store.synchronize = self._reduces
            if not self.is_direct:
                store.complete()

    def before_backward(self, action: Action) -> None:
        """Enables the reduction over data-parallel ranks for the last microbatch of a stage."""
        self.store.synchronize = self._reduces and action in self.final

    def reached(self) -> list[nn.Parameter]:
        """Returns the parameters that the loss's autograd node leads to."""
        return self.store.parameters if self.is_direct else self.store.parameters_with_grad(self._stashed)

    def finalize(self, scale: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Adds the gradients to the store at the scale that backward gives them.

        Args:
            scale (`float` or scalar `Tensor`): a tensor where the host would wait for its value.
            keep (`bool`): whether the loss may be backpropagated once more.

        Returns:
            the tensors, one for each of `reached()`, that autograd has to add; `None` for those that are added already.

        Raises:
            ConfigError: if the gradients were used already, or were accumulated at another scale.
        """
        if self._stashed is None and not self.scale.is_pending(self):
            raise ConfigError(
                "The loss of a pipelined model was backpropagated twice: its gradients are no longer there. Call the "
                "first backward with retain_graph=True."
            )
        self.scale.record(self, scale)
        if self.is_direct:
            error = ConfigError(
                f"The loss received the gradient {scale}, but {self.seed} was announced and this step's gradients are "
                "accumulated already. Set `get_parallel_state(model).pipeline.loss_scale.announced = None` and repeat "
                "the step."
            )
            if isinstance(scale, Tensor):
                # Checked later: reading the scale now would make the host wait for the device.
                check_soon((scale - self.seed).abs() <= _SAME_SCALE * abs(self.seed), lambda: error)
            elif not math.isclose(scale, self.seed, rel_tol=_SAME_SCALE):
                raise error
            return [None] * len(self.store.parameters)
        flushed = self.flush(scale / self.seed, keep=keep)
        if not self._reduces and self.store.synchronize:
            self.store.reduce()
        return flushed

    def flush(self, factor: float | Tensor, *, keep: bool) -> Sequence[Tensor | None]:
        """Adds `factor` times the stashed gradients to the store; see `GradStore.flush`."""
        stashed = self._stashed
        if not keep:
            self._stashed = None
        return self.store.flush(stashed, factor, keep=keep)
