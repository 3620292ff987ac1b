"""Activations that a hook takes out of a pipeline stage into a loss: their gradients would stay on that stage.

A stage's graph starts at its inputs, whose gradients the schedule sends to the previous stage once, and it is freed
when the schedule has run its backward: with labels, before the model returns.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from torch import Tensor

from ..errors import UnsupportedError

Cell = tuple[int, int]
# Part of torch's message for a graph that an earlier backward has freed.
_FREED = "backward through the graph a second time"


class RunningExecution(Protocol):
    """Execution of a schedule.

    Attributes:
        current: (stage, microbatch) whose backward the schedule runs at present.
    """

    current: Cell | None


def watch_inputs(execution: RunningExecution, cell: Cell, inputs: Iterable[Tensor]) -> None:
    """Registers a check on the inputs of a stage, of any shape: only the schedule differentiates them."""
    # Weak: the graph must not keep the execution alive.
    check = partial(_require_schedule, weakref.ref(execution), cell)
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.register_hook(check)


def _require_schedule(execution: "weakref.ref[RunningExecution]", cell: Cell, gradient: Tensor) -> None:
    alive = execution()
    if alive is None or alive.current != cell:
        raise _taken_activation()


def explain_freed_graph(error: RuntimeError) -> None:
    """Raises `UnsupportedError` for torch's error about a freed graph, in a job with a pipelined model."""
    if _FREED in str(error):
        raise _taken_activation() from error


def _taken_activation() -> UnsupportedError:
    return UnsupportedError(
        "A backward ran through a pipeline stage outside the schedule (a loss on an activation that a forward hook "
        "kept, or a second backward without retain_graph=True), so its gradients would not reach the other stages. "
        "Compute the loss from the model's outputs, or load the model with pp_size=1."
    )
