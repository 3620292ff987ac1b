"""Trainer names ranks that take longer than the others of their stage."""

from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ..debug.stragglers import Straggler, StragglerWatch


class StragglerCallback(TrainerCallback):
    """Prints on rank 0 which rank is slow, how much, and in which module and function.

    Args:
        arguments: of `StragglerWatch`, such as `steps` and `factor`.

    Raises:
        ConfigError: when training begins, a model that was not laid out, or a number out of its range.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._watch: StragglerWatch | None = None

    @property
    def reports(self) -> list[Straggler]:
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
        self._watch = StragglerWatch(model, getattr(optimizer, "optimizer", optimizer), **self._arguments)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.stop()
