"""Batch sizes that grow with the samples that were seen, as Megatron-LM's `--rampup-batch-size` has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from ..errors import DataError


@dataclass(frozen=True)
class BatchRampUp:
    """How many samples a step has: few at first, and more in equal parts of `samples`.

    `RampupBatchsizeNumMicroBatchesCalculator` of `megatron/core/num_microbatches_calculator.py`.

        dataset.ramp_up = BatchRampUp(512, start=32, increment=32, samples=1_000_000)

    Args:
        global_batch_size (`int`): of a step in the end, rows of all replicas.
        start (`int`): of the first step.
        increment (`int`): more with each part.
        samples (`int`): after which steps have all.

    Raises:
        DataError: numbers below 1, or a batch that whole increments do not reach.
    """

    global_batch_size: int
    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        numbers = self.global_batch_size, self.start, self.increment, self.samples
        if not all(isinstance(number, Integral) for number in numbers) or min(numbers) < 1:
            raise DataError(f"{self}: expected whole numbers of 1 or more.")
        rest = self.global_batch_size - self.start
        if rest < 0 or rest % self.increment:
            raise DataError(f"{self}: from {self.start} to {self.global_batch_size} are no whole increments.")

    def batch_size(self, seen: int) -> int:
        """Returns the samples of the step that follows so many."""
        increments = (self.global_batch_size - self.start) // self.increment
        if seen > self.samples or not increments:
            return self.global_batch_size
        return self.start + int(seen / (self.samples / increments)) * self.increment

    def batch_sizes(self) -> Sequence[int]:
        """Returns all sizes that steps have."""
        return range(self.start, self.global_batch_size + 1, self.increment)

    def after(self, steps: int, seen: int = 0) -> int:
        """Returns how many samples were seen after so many steps more."""
        while steps and seen <= self.samples:
            seen, steps = seen + self.batch_size(seen), steps - 1
        return seen + steps * self.global_batch_size

    def full_steps(self, seen: int, samples: int) -> int:
        """Returns how many steps the samples behind `seen` fill, of `samples` in all."""
        steps = 0
        while seen <= self.samples and seen + self.batch_size(seen) <= samples:
            seen, steps = seen + self.batch_size(seen), steps + 1
        return steps + (max(0, samples - seen) // self.global_batch_size if seen > self.samples else 0)

    def steps(self, samples: int) -> int:
        """Returns the steps of a run of so many samples, `--train-samples`; a last one that is not full is none."""
        steps = seen = 0
        # Megatron counts a step that only begins within them.
        while seen <= min(self.samples, samples):
            seen += self.batch_size(seen)
            steps += 1
        return steps + max(0, samples - seen) // self.global_batch_size
