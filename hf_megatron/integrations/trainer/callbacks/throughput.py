"""Trainer logs tokens per second and the share of its devices' peak that the model's own work reaches."""

from typing import Any

from transformers.trainer_callback import TrainerControl, TrainerState

from ....diagnostics.throughput import Throughput
from ....errors import ConfigError
from .base import LoggingCallback, ToolCallback


class ThroughputCallback(LoggingCallback, ToolCallback):
    """Adds to each log of training what it reached since the last one.

    | logged | |
    |---|---|
    | `tokens_per_second` | of the whole job, padding included; evaluation and saving take no time |
    | `tokens_per_second_per_device` | |
    | `tflops_per_device` | of the model's own work (see `diagnostics/throughput.py`); causal models of text |
    | `mfu` | of that, the share in the device's peak |

    Args:
        peak_tflops (`float`, *optional*): of one device with the training's precision, dense: 989 of an H100 with bf16.

    Raises:
        ConfigError: a peak of 0 or less.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ConfigError(f"ThroughputCallback(peak_tflops={peak_tflops}): expected more than 0.")
        self.peak_tflops = peak_tflops
        self._throughput: Throughput | None = None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._throughput = Throughput(model)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._throughput is not None:
            self._throughput.end_step()

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        if self._throughput is not None:
            self._throughput.begin_pause()

    on_evaluate = on_save = on_predict = _pause

    def numbers(self, args: Any, state: TrainerState, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns what was reached since the last log of training."""
        if self._throughput is None or "loss" not in logs:
            return {}
        return {name: round(value, 6) for name, value in self._throughput.take(self.peak_tflops).items()}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Ends the counting."""
        if self._throughput is not None:
            self._throughput.stop()
            self._throughput = None
