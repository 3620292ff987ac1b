"""Base classes of Trainer callbacks that run a diagnostics tool during selected steps or throughout training."""

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ....compat.patch_registry import PATCH_REGISTRY
from ....errors import ConfigError


class ToolCallback(TrainerCallback):
    """A callback whose tool patches the process during training and is removed when training fails."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `Trainer._inner_training_loop` has to call `abandon`, also for a model that is not parallelized.
        PATCH_REGISTRY.activate()
        return super().__new__(cls)

    def abandon(self) -> None:
        """Removes the tool; the current step did not finish."""
        raise NotImplementedError


def inner_training_loop(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Removes the tools of callbacks when training fails, and records the checkpoint that training resumes from."""
    self._hf_megatron_resumed = kwargs.get("resume_from_checkpoint")
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ToolCallback):
                try:
                    callback.abandon()
                except (RuntimeError, OSError, ValueError) as error:
                    # Warn only: the exception that ended training must stay visible.
                    warnings.warn(f"{type(callback).__name__} could not be removed: {error}", stacklevel=2)
        raise


class ToolOfStep:
    """Runs a context-manager tool for the duration of a step."""

    def __init__(self) -> None:
        self._tool: Any = None

    def begin(self, tool: Any) -> None:
        """Enters a tool; a tool whose step did not finish is left first."""
        self.end(is_done=False)
        tool.__enter__()
        self._tool = tool

    def end(self, *, is_done: bool) -> Any:
        """Leaves and returns the active tool, if any; with `is_done=False` as after an error in the step."""
        tool, self._tool = self._tool, None
        if tool is not None:
            error = None if is_done else RuntimeError("the step did not end")
            tool.__exit__(None if error is None else RuntimeError, error, None)
        return tool


class StepToolCallback(ToolCallback):
    """Wraps selected optimizer steps in a context-manager tool, each with a folder `step{N}`.

    Args:
        directory (`str` or `Path`): parent folder of the step folders.
        steps (`Iterable[int]`): optimizer steps, counted from 0.

    Raises:
        ConfigError: a step that is not an integer of 0 or more.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: Iterable[int]) -> None:
        self.directory, self.steps = Path(directory), frozenset([steps] if isinstance(steps, int | str) else steps)
        wrong = [step for step in self.steps if not isinstance(step, int) or isinstance(step, bool) or step < 0]
        if wrong:
            raise ConfigError(f"{type(self).__name__}(steps={wrong}): expected optimizer steps, counted from 0.")
        self._tool = ToolOfStep()

    def make_tool(self, folder: Path, model: Any, optimizer: Any) -> Any:
        """Returns the context manager for one step."""
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
        # Training may stop in the middle of a step.
        self.abandon()

    def abandon(self) -> None:
        """Leaves the tool without a record."""
        self._tool.end(is_done=False)


class WatchCallback(ToolCallback):
    """Runs a tool from the beginning of training to its end.

    Args:
        arguments: keyword arguments of the tool.

    Raises:
        ConfigError: when training begins, for a model that was not parallelized or arguments that the tool rejects.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._watch: Any = None

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> Any:
        """Returns the tool, with a `stop()` and its `reports`."""
        raise NotImplementedError

    @property
    def reports(self) -> list[Any]:
        """Findings so far, the same on every rank."""
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
        """Stops the tool."""
        self.stop()

    def stop(self) -> None:
        """Stops the tool and keeps its reports."""
        if self._watch is not None:
            self._watch.stop()


class LoggingCallback(TrainerCallback):
    """A callback that adds metrics to Trainer's logs, to its history and to all its reporting integrations."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `Trainer.log` has to call `numbers`, also for a model that is not parallelized.
        PATCH_REGISTRY.activate()
        return super().__new__(cls)

    def numbers(self, args: Any, state: TrainerState, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns metrics to add to the logs before they are reported; called on every rank."""
        raise NotImplementedError


def log(original: Callable, self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Adds the metrics of callbacks; upstream's reporting integrations see logs before a user's callback does."""
    for callback in self.callback_handler.callbacks:
        if isinstance(callback, LoggingCallback):
            logs.update(callback.numbers(self.args, self.state, self.model, logs))
    original(self, logs, *args, **kwargs)
