"""Experts of a generating pass, chosen again where TRL's online trainers compute losses of what was generated.

`MegatronConfig(router_replay=True)`. The recorded routing goes with the rows, through shuffling and splitting, as
tensors `[rows, tokens, layers, choices]` beside their tokens. References route themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...expert_parallel.router_replay import ABSENT, Routing, record_routing, replay_routing
from ...parallel_state import parallel_state, unwrap_parallel_model

PROMPTS, COMPLETIONS = "prompt_routing", "completion_routing"

# The routing of the rows that a trainer has generated last, while it scores them.
_GENERATED: ContextVar[list[Routing] | None] = ContextVar("routing of generated rows", default=None)


def replays(trainer: Any) -> bool:
    """Tells whether a trainer's model is to route as it did while it generated."""
    state = parallel_state(trainer.model)
    return state is not None and state.config.router_replay


def with_routing(score: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds the routing of the rows that `score` generates and scores to what it returns."""
    generated: list[Routing] = []
    token = _GENERATED.set(generated)
    try:
        rows = score()
    finally:
        _GENERATED.reset(token)
    prompt, completion = rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]
    routing = _fitted(generated[-1], prompt + completion).permute(1, 2, 0, 3)
    parts = routing.split([prompt, completion], 1)
    return rows | {name: part.contiguous() for name, part in zip((PROMPTS, COMPLETIONS), parts, strict=True)}


def generate_turn(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generates completions and notes the experts that were chosen."""
    generated = _GENERATED.get()
    if generated is None:
        return original(self, *args, **kwargs)
    with record_routing(unwrap_parallel_model(self.model)) as routing:
        found = original(self, *args, **kwargs)
    generated.append(routing)
    return found


def token_numbers(
    original: Callable,
    self: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes numbers `[rows, tokens]` of generated rows with the experts that generated them, if the model did."""
    generated = _GENERATED.get()
    context: AbstractContextManager[None] = nullcontext()
    if generated and model is self.model and not _is_reference(model):
        unsharded = _fitted(generated[-1], input_ids.shape[1])
        calls = [part.contiguous() for part in unsharded.split(batch_size or len(input_ids), 1)]
        context = replay_routing(unwrap_parallel_model(model), Routing(generated[-1].layers, calls))
    with context:
        return original(self, model, input_ids, attention_mask, logits_to_keep, *args, batch_size=batch_size, **kwargs)


def replaying(trainer: Any, rows: dict[str, Any]) -> AbstractContextManager[None]:
    """Has the model choose the experts of rows that are about to be computed, where they were recorded."""
    if PROMPTS not in rows:
        return nullcontext()
    routing = torch.cat([rows[PROMPTS], rows[COMPLETIONS]], 1).permute(2, 0, 1, 3)
    return replay_routing(unwrap_parallel_model(trainer.model), routing.contiguous())


def _fitted(routing: Routing, tokens: int) -> Tensor:
    """Returns `[layers, rows, tokens, choices]`: ranks wait for others' rows, and the last token was in no call."""
    joined = routing.joined(tokens)
    return F.pad(joined, (0, 0, 0, tokens - joined.shape[2]), value=ABSENT)


def _is_reference(model: Any) -> bool:
    """Tells whether adapters are switched off, as they are for the reference of a model with adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(module.disable_adapters for module in model.modules() if isinstance(module, BaseTunerLayer))
