"""Trainer's steps that have fewer calls than `gradient_accumulation_steps`, while batches grow.

Stock counts calls to know where a step ends, and takes as many for each. Those that a step does not have come first
and do nothing.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import repeated_rows, trainer, trainer_pipeline
from .counted_samples import SamplesCallback


class NoCall(dict):
    """Inputs of a call that a step does not have."""


def batches_of_step(
    original: Callable, self: Any, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any
) -> tuple[list, Any]:
    """Returns the batches of one step, behind those that it does not have, and the number of their targets, `()`."""
    callbacks, calls = self.callback_handler.callbacks, num_batches
    for counting in [one for one in callbacks if isinstance(one, SamplesCallback)]:
        calls = counting.calls(num_batches)
        # Before those that save at the end of a step, also where Trainer has made it anew of a checkpoint.
        callbacks.remove(counting)
        callbacks.insert(0, counting)
    batches, count = repeated_rows.get_batch_samples(original, self, epoch_iterator, calls, *args, **kwargs)
    return [NoCall() for _ in range(num_batches - calls)] + batches, count


def step_of_call(original: Callable, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns no loss, `()`, of a call that the step does not have."""
    if isinstance(inputs, NoCall):
        # Stock takes a mean over all that it collected, where a loss is none over targets.
        self.current_gradient_accumulation_steps -= 1
        return torch.zeros((), device=self.args.device)
    return trainer_pipeline.training_step(original, self, model, inputs, *args, **kwargs)


def tokens_of_call(original: Callable, self: Any, inputs: Any) -> None:
    """Counts no token of a call that the step does not have."""
    if not isinstance(inputs, NoCall):
        repeated_rows.track_num_input_tokens(original, self, inputs)


def operations_of_call(original: Callable, self: Any, inputs: Any) -> float:
    """Counts no operation of a call that the step does not have."""
    return 0.0 if isinstance(inputs, NoCall) else trainer.floating_point_ops(original, self, inputs)
