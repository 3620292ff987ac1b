"""SIGTERM handling: the current step finishes, everything is saved and all ranks stop at the same step."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ...core.communication.flags import reduce_flags
from ...parallel_state import parallel_state


class TerminationSignal:
    """Records SIGTERM inside its `with` block, so that a loop can stop between two steps.

        with TerminationSignal() as termination:
            for batch in loader:
                ...
                if termination.requested():
                    save()
                    break

    The previous handler is called as well and restored at the end. A second SIGTERM terminates at once. Outside the
    main thread Python allows no handler: such a rank still stops when another one got the signal.
    """

    def __init__(self) -> None:
        self.received = False
        self._installed = False
        self._previous: Any = None
        self._process = os.getpid()

    def __enter__(self) -> "TerminationSignal":
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._installed, self._process = True, os.getpid()
            self._previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        # Keep a handler installed in the meantime; a handler from outside Python, read as None, cannot be restored.
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Data loader workers inherit the handler by fork, but must terminate at once.
        if self.received or os.getpid() != self._process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.received = True
        if callable(self._previous):
            self._previous(number, frame)

    def requested(self) -> bool:
        """Returns whether any rank has received the signal; every rank of the job must call it at the same step."""
        return reduce_flags([self.received])[0]


class TerminationCallback(TrainerCallback):
    """Saves (unless `save_strategy="no"`) and stops training after the step in which SIGTERM arrived."""

    def __init__(self) -> None:
        self.signal = TerminationSignal()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Already entered if an earlier training raised.
        self.signal.__enter__()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        # The Trainer of a parallelized model agrees on the control's flags itself.
        is_agreed = model is not None and parallel_state(model) is not None
        if self.signal.received if is_agreed else self.signal.requested():
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.signal.__exit__()
