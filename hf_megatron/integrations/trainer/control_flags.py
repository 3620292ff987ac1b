"""Control flags of Trainer's callbacks: a flag that a callback sets on one rank reaches all ranks in the same step.

Stock Trainer stops, saves or evaluates on the rank whose flag is set; the other ranks wait for it until the timeout.
"""

from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerControl

from ...core.communication.flags import reduce_flags
from ...parallel_state import parallel_state

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def agree_on_flags(control: TrainerControl) -> None:
    """Sets each flag that any rank has set; collective."""
    for name, value in zip(_FLAGS, reduce_flags([getattr(control, name) for name in _FLAGS]), strict=True):
        setattr(control, name, value)


def maybe_log_save_evaluate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Agrees on the flags before they are read, and again if the step reports: its callbacks may stop training."""
    if parallel_state(self.model) is None:
        original(self, *args, **kwargs)
        return
    agree_on_flags(self.control)
    reports = self.control.should_log or self.control.should_evaluate or self.control.should_save
    original(self, *args, **kwargs)
    if reports:
        agree_on_flags(self.control)
