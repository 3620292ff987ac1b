"""Tells a vocabulary head whether the forward under way takes a loss, and hands out full logits in evaluation."""

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
    """Model hooks that tell the head whether the forward takes a loss, and hand out full logits in evaluation."""

    def __init__(self, head: VocabParallelHead, model: Any):
        self.head = self.called = head
        self.is_last = model.get_output_embeddings() is head
        self.signature = inspect.signature(model.forward)

    def install(self, hooks: ForwardHooks) -> None:
        """Adds the functions to a model's table of hooks."""
        hooks.add("pending loss", self._enter, self._leave, always_exit=True)

    def _enter(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels", kwargs.get("shift_labels"))
        if labels is None and args:
            labels = self.signature.bind_partial(*args).arguments.get("labels")
        # An adapter may have a head of its own.
        called = called_module(model.get_output_embeddings()) if self.is_last else self.head
        self.called = called if isinstance(called, VocabParallelHead) else self.head
        self.called.loss_is_pending = labels is not None

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        self.called.loss_is_pending = False
        if torch.is_grad_enabled():
            return output
        # Evaluation and prediction read the logits as tensors, on every rank.
        if isinstance(output, tuple):
            return tuple(v.gather(warn=False) if isinstance(v, ShardedLogits) else v for v in output)
        logits = getattr(output, "logits", None)
        if isinstance(logits, ShardedLogits):
            output.logits = logits.gather(warn=False)
        return output


def install_pending_loss(model: nn.Module, state: ParallelState) -> None:
    """Tells a model's vocabulary heads when a loss is taken of their logits, and when an optimizer changes weights."""

    taken = StepsTaken()
    for head in [module for module in model.modules() if isinstance(module, VocabParallelHead)]:
        head.model = weakref.ref(model)
        PendingLoss(head, model).install(state.hooks)
        head.steps = taken
    assert state.data_parallel is not None
    state.data_parallel.callbacks.guards.append(taken.count)
