"""Batch size ramp-up by the number of samples seen, as in Megatron-LM's `--rampup-batch-size`."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from ..errors import DataError


@dataclass(frozen=True)
class BatchRampUp:
    """Batch size of each step: it begins small and grows by equal increments over the first `samples` samples.

    See `RampupBatchsizeNumMicroBatchesCalculator` of `megatron/core/num_microbatches_calculator.py`.

        dataset.ramp_up = BatchRampUp(512, start=32, increment=32, samples=1_000_000)

    Args:
        global_batch_size (`int`): final batch size of a step, over all replicas.
        start (`int`): batch size of the first step.
        increment (`int`): added each time.
        samples (`int`): number of samples after which the final size is reached.

    Raises:
        DataError: values below 1, or a final size that is not `start` plus a multiple of `increment`.
    """

    global_batch_size: int
    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        values = self.global_batch_size, self.start, self.increment, self.samples
        if not all(isinstance(number, Integral) for number in values) or min(values) < 1:
            raise DataError(f"{self}: expected integers of 1 or more.")
        rest = self.global_batch_size - self.start
        if rest < 0 or rest % self.increment:
            raise DataError(
                f"{self}: the range {self.start} to {self.global_batch_size} is not a multiple of the increment."
            )

    def batch_size(self, seen: int) -> int:
        """Returns the batch size of the step after `seen` samples."""
        increments = (self.global_batch_size - self.start) // self.increment
        if seen > self.samples or not increments:
            return self.global_batch_size
        return self.start + int(seen / (self.samples / increments)) * self.increment

    def batch_sizes(self) -> Sequence[int]:
        """Returns all batch sizes that occur."""
        return range(self.start, self.global_batch_size + 1, self.increment)

    def after(self, steps: int, seen: int = 0) -> int:
        """Returns the number of samples seen after `steps` further steps."""
        while steps and seen <= self.samples:
            seen, steps = seen + self.batch_size(seen), steps - 1
        return seen + steps * self.global_batch_size

    def full_steps(self, seen: int, samples: int) -> int:
        """Returns the number of full steps between `seen` and `samples`."""
        steps = 0
        while seen <= self.samples and seen + self.batch_size(seen) <= samples:
            seen, steps = seen + self.batch_size(seen), steps + 1
        return steps + (max(0, samples - seen) // self.global_batch_size if seen > self.samples else 0)

    def steps(self, samples: int) -> int:
        """Returns the steps of a run with `--train-samples`; an incomplete last step does not count."""
        steps = seen = 0
        # During the ramp-up, Megatron counts a step if it begins within the samples.
        while seen <= min(self.samples, samples):
            seen += self.batch_size(seen)
            steps += 1
        return steps + max(0, samples - seen) // self.global_batch_size
