"""What Trainer's callbacks of debugging tools have in common: a tool around some steps, or one for all of training."""

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ....compat.patch_registry import PATCH_REGISTRY
from ....errors import ConfigError


class ToolCallback(TrainerCallback):
    """A callback whose tool changes the process while training runs, and lets go of it when an error ends that."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `Trainer._inner_training_loop` has to call `abandon`, also for a model that is not parallelized.
        PATCH_REGISTRY.activate()
        return super().__new__(cls)

    def abandon(self) -> None:
        """Takes the tool away; the step that it was in did not end."""
        raise NotImplementedError


def inner_training_loop(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Has tools of callbacks let go when an error ends training, and says what it goes on from."""
    self._hf_megatron_resumed = kwargs.get("resume_from_checkpoint")
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ToolCallback):
                try:
                    callback.abandon()
                except (RuntimeError, OSError, ValueError) as error:
                    # What ended training is what has to be seen.
                    warnings.warn(f"{type(callback).__name__} was not taken away: {error}", stacklevel=2)
        raise


class ToolOfStep:
    """Holds a tool that is a context manager while a step runs."""

    def __init__(self) -> None:
        self._tool: Any = None

    def begin(self, tool: Any) -> None:
        """Enters a tool, and leaves one whose step did not end."""
        self.end(is_done=False)
        tool.__enter__()
        self._tool = tool

    def end(self, *, is_done: bool) -> Any:
        """Leaves the tool, if there is one, and returns it; without `is_done` as after an error in the step."""
        tool, self._tool = self._tool, None
        if tool is not None:
            error = None if is_done else RuntimeError("the step did not end")
            tool.__exit__(None if error is None else RuntimeError, error, None)
        return tool


class StepToolCallback(ToolCallback):
    """Puts a tool that is a context manager around some optimizer steps, each with a folder `step{N}`.

    Args:
        directory (`str` or `Path`): where the folders go.
        steps (`Iterable[int]`): optimizer steps, counted from 0.

    Raises:
        ConfigError: steps that are no whole numbers of 0 or more.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int]) -> None:
        self.directory, self.steps = Path(directory), frozenset([steps] if isinstance(steps, int | str) else steps)
        wrong = [step for step in self.steps if not isinstance(step, int) or isinstance(step, bool) or step < 0]
        if wrong:
            raise ConfigError(f"{type(self).__name__}(steps={wrong}): expected optimizer steps, counted from 0.")
        self._tool = ToolOfStep()

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> Any:
        """Returns what is put around a step."""
        raise NotImplementedError

    def on_step_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step in self.steps:
            self._tool.begin(self.make_tool(self.directory / f"step{state.global_step}", model, optimizer))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._tool.end(is_done=True)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Training may be stopped within a step.
        self.abandon()

    def abandon(self) -> None:
        """Leaves the tool without a record."""
        self._tool.end(is_done=False)


class WatchCallback(ToolCallback):
    """Has a tool look on from the beginning of training to its end.

    Args:
        arguments: of the tool.

    Raises:
        ConfigError: when training begins, a model that was not laid out, or what the tool refuses of its arguments.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._watch: Any = None

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> Any:
        """Returns the tool, with a `stop()` and its `reports`."""
        raise NotImplementedError

    @property
    def reports(self) -> list[Any]:
        """What was found so far, the same on every rank."""
        return [] if self._watch is None else list(self._watch.reports)

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self.stop()
        self._watch = self.make_watch(model, optimizer, **self._arguments)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stop()

    def abandon(self) -> None:
        """Ends the tool."""
        self.stop()

    def stop(self) -> None:
        """Ends the tool, whose reports stay."""
        if self._watch is not None:
            self._watch.stop()


class LoggingCallback(TrainerCallback):
    """A callback whose numbers are in Trainer's logs, in its history and wherever it reports to."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `Trainer.log` has to call `numbers`, also for a model that is not parallelized.
        PATCH_REGISTRY.activate()
        return super().__new__(cls)

    def numbers(self, args: Any, state: TrainerState, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns what is added to logs that are about to be told; every rank is asked."""
        raise NotImplementedError


def log(original: Callable, self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Adds the numbers of callbacks; stock tells logs to those it reports to before a user's callback sees them."""
    for callback in self.callback_handler.callbacks:
        if isinstance(callback, LoggingCallback):
            logs.update(callback.numbers(self.args, self.state, self.model, logs))
    original(self, logs, *args, **kwargs)
