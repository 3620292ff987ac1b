"""Trainer callback that logs tokens per second and model FLOPs utilization (MFU)."""

from typing import Any

from transformers.trainer_callback import TrainerControl, TrainerState

from ....diagnostics.throughput import Throughput
from ....errors import ConfigError
from .base import LoggingCallback, ToolCallback


class ThroughputCallback(LoggingCallback, ToolCallback):
    """Adds the throughput since the last log to each training log.

    | logged | |
    |---|---|
    | `tokens_per_second` | tokens of the job, padding included; evaluation and saving time is excluded |
    | `tokens_per_second_per_device` | |
    | `tflops_per_device` | model FLOPs (see `diagnostics/throughput.py`); causal text models only |
    | `mfu` | model FLOPs utilization: their fraction of the device's peak |

    Args:
        peak_tflops (`float`, *optional*): dense peak of one device in the training precision, such as 989 for an H100
            in bf16.

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
        """Returns the throughput since the last training log."""
        if self._throughput is None or "loss" not in logs:
            return {}
        return {name: round(value, 6) for name, value in self._throughput.take(self.peak_tflops).items()}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Stops counting."""
        if self._throughput is not None:
            self._throughput.stop()
            self._throughput = None
