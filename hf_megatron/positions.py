"""Whether a model numbers its tokens itself in the call under way: then no row holds several documents.

transformers looks for them in every forward without a mask, and the host waits for its device to know.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .parallel_state import ParallelState, parallel_state
from .patch_ledger import LEDGER, Shared

POSITIONS = "position_ids"


class OwnPositions(Shared):
    """Notes for each call of a model whether it was given positions."""

    def __init__(self, model: Any, state: ParallelState):
        self.state = state
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]

    def install(self, model: Any) -> None:
        if POSITIONS in self.names:
            model.register_forward_pre_hook(self._enter, with_kwargs=True)
            model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        self.state.numbers_tokens = given.get(POSITIONS) is None

    def _leave(self, model: Any, args: tuple, output: Any) -> None:
        self.state.numbers_tokens = False


def find_packed_sequence_indices(original: Callable, position_ids: torch.Tensor) -> torch.Tensor | None:
    """Tells documents in rows apart by positions `[batch, sequence]`; `None` without a look at a model's own ones."""
    if not torch.compiler.is_compiling():
        states = filter(None, map(parallel_state, LEDGER.models))
        if any(state.numbers_tokens for state in states):
            return None
    return original(position_ids)
