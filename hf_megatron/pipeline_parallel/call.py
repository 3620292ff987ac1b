"""Where the gradients of one schedule go until backward tells how much they count."""

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .schedules import Action, Kind

if TYPE_CHECKING:
    from .engine import Pipeline

# An announced scale and the one that arrives are rounded differently, to fp32 at every factor.
_SAME_SCALE = 1e-6


class Call:
    """Where the gradients of one schedule go.

    Straight into the model's sums, if these are empty (they can be scaled afterwards) or the scale is known; else into
    sums of their own until backward tells the scale.

    Attributes:
        seed (`float`): what each microbatch's backward starts from.
    """

    def __init__(self, pipeline: "Pipeline", actions: tuple[Action, ...], seed: float | None = None):
        self.pipeline, self.engine = pipeline, pipeline.engine
        self.store: Any = pipeline.engine.gradients
        self.number = next(pipeline._numbers)
        self.final = _final_backwards(actions)
        is_known = seed is not None or pipeline.expected_scale is not None
        if self.store.is_empty:
            self.engine.unsettled.clear()
            pipeline._alone = self
        self.is_direct = pipeline._alone is self or (is_known and pipeline.waited_for() is None)
        if self.is_direct and pipeline._alone is not self:
            pipeline._alone = None
        # What a reverse pipeline is given is scaled already, by a factor that nobody knows.
        self.is_reverse = seed is not None
        if seed is not None:
            self.seed = seed
        elif pipeline.expected_scale is not None:
            self.seed = pipeline.expected_scale()
        else:
            self.seed = pipeline.scale_hint() if pipeline._scale is None else pipeline._scale
        self.is_guess = seed is None and pipeline.expected_scale is None
        self.settled = False
        self._sums: Any = None
        self._waiting: list[tuple[Any, float]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Call":
        self.synchronise = self.store.synchronise
        self.tied = self.pipeline.tied()
        self.store.complete()
        if not self.is_direct:
            before = self.store.put_aside()
            self._stack.callback(lambda: setattr(self, "_sums", self.store.take_back(before)))
            self._stack.enter_context(self.store.no_sync())
        self._stack.callback(lambda: setattr(self.store, "synchronise", self.synchronise))
        self._held = ExitStack()
        self._held.enter_context(self.store.hold(self.tied))
        if self.is_direct:
            self.engine.unsettled.add(self.number)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.pipeline.sum_tied()
        self.store.synchronise = self.synchronise and self.is_direct and not self.is_reverse
        self._held.close()
        self._stack.close()

    def before_backward(self, action: Action) -> None:
        """Reduction over dp ranks may begin with the last microbatch of a stage."""
        is_last = self.is_direct and not self.is_reverse and action in self.final
        self.store.synchronise = self.synchronise and is_last

    def settle(self, scale: float) -> None:
        """Backward tells the scale of the gradients.

        Raises:
            ConfigError: the gradients are mixed with others already, at another scale.
        """
        if self.settled or (self.is_direct and self.number not in self.engine.unsettled):
            raise ConfigError(
                "The loss of a pipelined model was backpropagated twice, or after zero_grad() or a later step: its "
                "gradients are no longer there."
            )
        self.settled = True
        self.engine.unsettled.discard(self.number)
        if not self.is_direct:
            sums, self._sums = (self._sums, scale / self.seed), None
            first = self.pipeline.waited_for()
            if first is None:
                self.store.add(*sums)
            else:
                first._waiting.append(sums)
        elif not math.isclose(scale, self.seed, rel_tol=_SAME_SCALE):
            if self.pipeline._alone is not self:
                raise ConfigError(
                    f"The loss received the gradient {scale}, the loop announced {self.seed}: this step's gradients "
                    "are added up already. Set `pipeline.expected_scale = None`."
                )
            self.store.scale(scale / self.seed)
        while self._waiting:
            self.store.add(*self._waiting.pop(0))
        if not self.is_reverse and math.isfinite(scale) and scale:
            self.pipeline._scale = scale


def _final_backwards(actions: tuple[Action, ...]) -> frozenset[Action]:
    """Each stage's last action that adds gradients to its parameters."""
    last = {a.stage: a for a in actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
    return frozenset(last.values())
