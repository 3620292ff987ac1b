"""Router replay for TRL's online trainers: losses reuse the experts that were chosen during generation.

Enabled by `MegatronConfig(router_replay=True)`. Recorded routing is shuffled and split together with the samples, as
tensors `[batch, tokens, layers, choices]`. Reference models compute their own routing.
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

# Routing of the samples generated last, while a trainer scores them.
_GENERATED: ContextVar[list[Routing] | None] = ContextVar("routing of generated rows", default=None)


def replays(trainer: Any) -> bool:
    """Returns whether a trainer's model replays the routing of its generation."""
    state = parallel_state(trainer.model)
    return state is not None and state.config.router_replay


def with_routing(score: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds the routing of the samples that `score` generates to its result."""
    generated: list[Routing] = []
    token = _GENERATED.set(generated)
    try:
        rows = score()
    finally:
        _GENERATED.reset(token)
    prompt, completion = rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]
    # `[layers, batch, tokens, choices]` to `[batch, tokens, layers, choices]`: TRL shuffles and splits dim 0.
    routing = _fitted(generated[-1], prompt + completion).permute(1, 2, 0, 3)
    parts = routing.split([prompt, completion], 1)
    return rows | {name: part.contiguous() for name, part in zip((PROMPTS, COMPLETIONS), parts, strict=True)}


def generate_turn(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generates completions and records the chosen experts."""
    generated = _GENERATED.get()
    if generated is None:
        return original(self, *args, **kwargs)
    with record_routing(unwrap_parallel_model(self.model)) as routing:
        result = original(self, *args, **kwargs)
    generated.append(routing)
    return result


def token_numbers(
    original: Callable,
    self: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes per-token values `[batch, tokens]` of generated samples with their recorded routing, if any."""
    generated = _GENERATED.get()
    context: AbstractContextManager[None] = nullcontext()
    if generated and model is self.model and not _is_reference(model):
        recorded_routing = _fitted(generated[-1], input_ids.shape[1])
        # Keyword-only in TRL 1.14.
        batch_size = kwargs.get("batch_size", args[0] if args else None) or len(input_ids)
        calls = [part.contiguous() for part in recorded_routing.split(batch_size, 1)]
        context = replay_routing(unwrap_parallel_model(model), Routing(generated[-1].layers, calls))
    with context:
        return original(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)


def replaying(trainer: Any, rows: dict[str, Any]) -> AbstractContextManager[None]:
    """Returns a context that replays the recorded routing of samples, if there is any."""
    if PROMPTS not in rows:
        return nullcontext()
    # Back to `[layers, batch, tokens, choices]`, the layout of a model call.
    routing = torch.cat([rows[PROMPTS], rows[COMPLETIONS]], 1).permute(2, 0, 1, 3)
    return replay_routing(unwrap_parallel_model(trainer.model), routing.contiguous())


def _fitted(routing: Routing, tokens: int) -> Tensor:
    """Returns `[layers, batch, tokens, choices]`, truncated or padded to `tokens`.

    Ranks that wait for other ranks' samples generate more tokens, and the last token was in no call.
    """
    joined = routing.joined(tokens)
    return F.pad(joined, (0, 0, 0, tokens - joined.shape[2]), value=ABSENT)


def _is_reference(model: Any) -> bool:
    """Returns whether adapters are disabled, as for the reference of a model with adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(module.disable_adapters for module in model.modules() if isinstance(module, BaseTunerLayer))
