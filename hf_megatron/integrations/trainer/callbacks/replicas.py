"""Trainer callback that periodically compares state which ranks hold in common."""

from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from ....diagnostics.replica_check import ReplicaCheck
from ....errors import ConfigError
from ....parallel_state import parallel_state


class ReplicaCallback(TrainerCallback):
    """Ends training with a `ReplicaError` when ranks disagree on weights, moments, buffers or random states.

    Args:
        every (`int`, defaults to 100): optimizer steps between comparisons; a first comparison runs before training.

    Raises:
        ConfigError: `every` is less than 1; when training begins, for a model that was not parallelized.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ConfigError(f"ReplicaCallback(every={every}): expected 1 or more.")
        self.every = every
        self._check: ReplicaCheck | None = None

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if parallel_state(model) is None:
            raise ConfigError(
                "ReplicaCallback compares the ranks of a parallelized model. Load the model with megatron_config=, or "
                "remove the callback."
            )
        self._check = ReplicaCheck(model, optimizer)
        self._check()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._check is not None and state.global_step % self.every == 0:
            self._check()
