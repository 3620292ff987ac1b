"""Callbacks that add numbers to what Trainer logs, before anything that shows or sends logs sees them."""

from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerState


class LoggingCallback(TrainerCallback):
    """A callback whose numbers are in Trainer's logs, in its history and wherever it reports to."""

    def numbers(self, args: Any, state: TrainerState, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns what is added to logs that are about to be told; every rank is asked."""
        raise NotImplementedError


def log(original: Callable, self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Adds the numbers of callbacks; stock tells logs to those it reports to before a user's callback sees them."""
    for callback in self.callback_handler.callbacks:
        if isinstance(callback, LoggingCallback):
            logs.update(callback.numbers(self.args, self.state, self.model, logs))
    original(self, logs, *args, **kwargs)
