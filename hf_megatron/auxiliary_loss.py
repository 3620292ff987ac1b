"""The losses that models add for their routers, over the batch whose parts lie on several ranks.

The load balancing loss is a product of two means over a batch's tokens, and so no mean of those of its parts:

| `auxiliary_loss` | what is added | equal under |
|---|---|---|
| `"batch"` | of the whole batch, as in one process | dp, tp, sp; a pipeline with one microbatch |
| `"sequence"` | the mean over rows of each row's own | every layout and accumulation |
| `"microbatch"` | the mean over the parts of a batch, weighted by rows | tp, sp |

transformers keeps a copy of the function in each file that has routers; each one is replaced by what is here, and is
itself used where no layout is concerned.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .loss import BatchLoss

_CALL: ContextVar["_Call | None"] = ContextVar("hf_megatron_router_losses", default=None)

_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids")


@dataclass(frozen=True)
class _Call:
    batch: BatchLoss
    arguments: Mapping[str, Any]

    @property
    def rows(self) -> int:
        share = self.batch.share
        arguments = self.arguments if share is None else share.arguments
        return next(value.shape[0] for name in _INPUTS if isinstance(value := arguments.get(name), Tensor))


def router_losses_of(batch: BatchLoss, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Lets the router losses of a call of the model know their batch, until the function returned is called."""
    token = _CALL.set(_Call(batch, arguments))
    return lambda: _CALL.reset(token)


def load_balancing_loss(
    original: Callable,
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    """Computes the loss of softmax routers, a scalar, from a tuple of logits `[tokens, experts]`."""

    call = _CALL.get()
    if call is None or num_experts is None or not isinstance(gate_logits, tuple):
        return original(gate_logits, num_experts, top_k, attention_mask)
    batch = call.batch
    gate_logits = tuple(map(batch.join_tokens, gate_logits))
    if batch.auxiliary == "microbatch" or (batch.auxiliary == "batch" and not batch.over_ranks):
        loss = original(gate_logits, num_experts, top_k, attention_mask)
        return loss if batch.auxiliary == "batch" else batch.row_mean(loss * call.rows, call.rows)
    rows = call.rows if batch.auxiliary == "sequence" else 1
    chosen, probabilities, tokens = _statistics(gate_logits, num_experts, top_k, attention_mask, rows)
    if batch.auxiliary == "batch":
        sums = batch.sum(torch.cat([chosen.flatten(), probabilities.flatten(), tokens]))
        chosen, probabilities, tokens = sums[:num_experts], sums[num_experts:-1], sums[-1]
        return num_experts * (chosen * probabilities).sum() / tokens.square()
    # A row of padding alone has no tokens, and adds nothing.
    losses = num_experts * (chosen * probabilities).sum(-1) / tokens.square().clamp(min=1)
    return batch.row_mean(losses.sum(), rows)


def row_mean(original: Callable, router_values: Tensor, *args: Any) -> Tensor:
    """Computes a loss, a scalar, that is a mean over rows already, of `[rows, tokens, experts]` (Switch)."""
    call, loss = _CALL.get(), original(router_values, *args)
    if call is None or not (call.batch.over_ranks or call.batch.share):
        return loss
    rows = router_values.shape[0]
    return call.batch.row_mean(loss * rows, rows)


def _statistics(
    gate_logits: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over layers, for each of `rows` parts of the tokens: choices, probabilities `[rows, experts]`; tokens."""
    device = gate_logits[0].device
    choices = torch.zeros(rows * experts, device=device)
    probability = torch.zeros(rows, experts, device=device)
    tokens = torch.zeros(rows, device=device)
    for logits in gate_logits:
        weights = F.softmax(logits.to(device), dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices
        counts = torch.ones(len(chosen), device=device) if mask is None else mask.reshape(-1).to(device).float()
        row = torch.arange(rows, device=device).repeat_interleave(len(chosen) // rows)
        index = chosen + row.unsqueeze(-1) * experts
        choices = choices.scatter_add(0, index.flatten(), counts.repeat_interleave(chosen.shape[-1]))
        probability = probability + (weights.float() * counts.unsqueeze(-1)).view(rows, -1, experts).sum(1)
        tokens = tokens + counts.view(rows, -1).sum(1)
    return choices.view(rows, experts), probability, tokens
