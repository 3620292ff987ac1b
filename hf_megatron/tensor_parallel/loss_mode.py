"""Informs a vocabulary head whether the current forward computes a loss; gathers full logits in evaluation."""

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from ..compat.torch_autograd import called_module
from ..core.forward_hooks import ForwardHooks
from ..parallel_state import ParallelState
from .vocab_parallel_head import ShardedLogits, StepsTaken, VocabParallelHead


class PendingLoss:
    """Model hooks that set the head's `loss_is_pending` in each forward, and gather full logits in evaluation."""

    def __init__(self, head: VocabParallelHead, model: Any):
        self.head = self.called = head
        self.is_last = model.get_output_embeddings() is head
        self.signature = inspect.signature(model.forward)

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the functions in a model's table of hooks."""
        hooks.add("pending loss", self._enter, self._leave, always_exit=True)

    def _enter(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        # With labels the head returns lazy logits, otherwise full ones.
        labels = kwargs.get("labels", kwargs.get("shift_labels"))
        if labels is None and args:
            labels = self.signature.bind_partial(*args).arguments.get("labels")
        # An adapter may wrap or replace the head.
        called = called_module(model.get_output_embeddings()) if self.is_last else self.head
        self.called = called if isinstance(called, VocabParallelHead) else self.head
        self.called.loss_is_pending = labels is not None

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        self.called.loss_is_pending = False
        if torch.is_grad_enabled():
            return output
        # Evaluation and prediction read the logits as tensors, on every rank: [batch, sequence, vocab].
        if isinstance(output, tuple):
            return tuple(v.gather(warn=False) if isinstance(v, ShardedLogits) else v for v in output)
        logits = getattr(output, "logits", None)
        if isinstance(logits, ShardedLogits):
            output.logits = logits.gather(warn=False)
        return output


def install_pending_loss(model: nn.Module, state: ParallelState) -> None:
    """Connects a model's vocabulary heads to its forwards (is a loss pending) and to the steps of its optimizers."""

    taken = StepsTaken()
    for head in [module for module in model.modules() if isinstance(module, VocabParallelHead)]:
        head.model = weakref.ref(model)
        PendingLoss(head, model).install(state.hooks)
        head.steps = taken
    assert state.data_parallel is not None
    state.data_parallel.callbacks.guards.append(taken.count)
