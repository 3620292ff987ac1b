"""Trainer steps of a pipelined model: loss scale known before the forward, and logits only where they are read.

A pipelined model computes gradients together with the loss. If the factor that the backward will apply is known in
advance, gradients accumulate directly into the gradients of earlier batches; otherwise they need a separate buffer
until the backward.
"""

import functools
from collections.abc import Callable
from typing import Any

import transformers

from ...parallel_state import parallel_state
from .padded_batches import evaluated


def is_pipelined(trainer: Any) -> bool:
    """Returns whether a trainer's model is split over pipeline stages."""
    state = parallel_state(trainer.model)
    return state is not None and state.pipeline is not None


def training_step(original: Callable, self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """Announces the factor of the loss, `()`, to the pipeline, unless `compute_loss` was overridden."""
    # An overridden compute_loss may transform the loss, so the factor is unknown before the backward.
    if "compute_loss" in vars(self) or type(self).compute_loss is not transformers.Trainer.compute_loss:
        return original(self, model, inputs, num_items_in_batch)
    state = parallel_state(self.model)
    assert state is not None and state.pipeline is not None
    scale = functools.partial(_scale, self, num_items_in_batch is not None)
    with state.pipeline.loss_scale.announce(scale):
        return original(self, model, inputs, num_items_in_batch)


def _scale(trainer: Any, has_count: bool) -> float:
    """Returns the factor that stock `compute_loss`, `training_step` and `Accelerator.backward` apply to the loss."""
    accelerator, scale = trainer.accelerator, 1.0
    passes_count = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if has_count and trainer.args.average_tokens_across_devices and passes_count:
        scale *= accelerator.num_processes // trainer.get_tp_size()
    divided = trainer.loss_is_scaled_for_ga
    if divided is None:
        divided = (trainer.model_accepts_loss_kwargs and has_count) or trainer.compute_loss_func is not None
    if not divided:
        scale /= trainer.current_gradient_accumulation_steps
    scale /= accelerator.gradient_accumulation_steps
    return scale if accelerator.scaler is None else scale * accelerator.scaler.get_scale()


def prediction_step(
    original: Callable, self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
) -> Any:
    """Computes the loss `()` over the samples of all ranks; sends logits to other stages only if they are read."""
    state = None if self.model is None else parallel_state(self.model)
    if state is None or state.loss is None:
        return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
    pipeline = state.pipeline
    # A subclass that computes its own loss may read the logits of a call with labels.
    own_loss = type(self).compute_loss is not transformers.Trainer.compute_loss

    def step(rows: Any) -> Any:
        if pipeline is None or not prediction_loss_only or own_loss:
            return original(self, model, rows, prediction_loss_only, *args, **kwargs)
        before, pipeline.wants_logits = pipeline.wants_logits, False
        try:
            return original(self, model, rows, prediction_loss_only, *args, **kwargs)
        finally:
            pipeline.wants_logits = before

    return evaluated(self, state, inputs, step)
