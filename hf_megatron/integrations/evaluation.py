"""Trainer's evaluation of a pipelined model: logits travel between ranks only where somebody reads them."""

import functools
from collections.abc import Callable
from typing import Any

from ..state import parallel_state


def prediction_step(original: Callable) -> Callable:
    """Keeps logits on the last stage while Trainer wants nothing but the loss."""

    @functools.wraps(original)
    def wrapper(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        state = None if self.model is None else parallel_state(self.model)
        pipeline = None if state is None else state.pipeline
        if pipeline is None or not prediction_loss_only or _computes_loss_itself(self):
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
        before, pipeline.wants_logits = pipeline.wants_logits, False
        try:
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            pipeline.wants_logits = before

    return wrapper


def _computes_loss_itself(trainer: Any) -> bool:
    """Whether a subclass computes the loss, which may read the logits of a call with labels."""
    from transformers import Trainer

    return type(trainer).compute_loss is not Trainer.compute_loss
