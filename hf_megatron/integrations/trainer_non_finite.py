"""Trainer says where a step that was skipped was not finite first."""

from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ..debug.non_finite import NonFiniteReport, NonFiniteWatch


class NonFiniteCallback(TrainerCallback):
    """Runs skipped steps again, and prints on rank 0 which rank, microbatch, stage and module was not finite first.

    Args:
        limit (`int`, defaults to 3): reports of a run.

    Raises:
        ConfigError: when training begins, a model that was not laid out.
    """

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self._watch: NonFiniteWatch | None = None

    @property
    def reports(self) -> list[NonFiniteReport]:
        """What was found so far, the same on every rank."""
        return [] if self._watch is None else self._watch.reports

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        # Accelerate's is around the one that steps.
        self._watch = NonFiniteWatch(model, getattr(optimizer, "optimizer", optimizer), limit=self.limit)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.stop()
