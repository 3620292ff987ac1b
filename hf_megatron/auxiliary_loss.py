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

# Router logits of one layer -> chosen experts `[tokens, k]`, probabilities `[tokens, experts]`.
Routing = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Call:
    batch: BatchLoss
    arguments: Mapping[str, Any]

    @property
    def rows(self) -> int:
        share = self.batch.share
        arguments = self.arguments if share is None else share.arguments
        return next(value.shape[0] for name in _INPUTS if isinstance(value := arguments.get(name), Tensor))


_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "encoder_outputs", "decoder_input_ids")


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

    def routing(logits: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(logits, dim=-1)
        return probabilities.topk(top_k, dim=-1).indices, probabilities

    return _balance(
        lambda: original(gate_logits, num_experts, top_k, attention_mask),
        *(gate_logits, num_experts, attention_mask, routing, 1),
    )


def product_key_loss(
    original: Callable,
    gate_logits: Any,
    num_experts: int | None = None,
    num_keys: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    """Computes the loss of Doge's routers, a scalar, from a tuple of logits `[2, tokens, keys]`."""

    def routing(logits: Tensor) -> tuple[Tensor, Tensor]:
        (scores_x, scores_y), (indices_x, indices_y) = logits.topk(num_keys, dim=-1)
        scores = (scores_x.unsqueeze(-1) + scores_y.unsqueeze(-2)).flatten(-2)
        indices = (indices_x.unsqueeze(-1) * num_keys + indices_y.unsqueeze(-2)).flatten(-2)
        chosen = indices.gather(-1, scores.topk(top_k, dim=-1).indices)
        return chosen, torch.zeros_like(scores).scatter(-1, indices, F.softmax(scores, dim=-1))

    return _balance(
        lambda: original(gate_logits, num_experts, num_keys, top_k, attention_mask),
        *(gate_logits, num_experts, attention_mask, routing, top_k),
    )


def row_mean(original: Callable, router_values: Tensor, *args: Any) -> Tensor:
    """Computes a loss, a scalar, that is a mean over rows already, of `[rows, tokens, experts]` (Switch)."""
    call, loss = _CALL.get(), original(router_values, *args)
    if call is None or not (call.batch.over_ranks or call.batch.share):
        return loss
    rows = router_values.shape[0]
    return call.batch.row_mean(loss * rows, rows)


def _balance(
    stock: Callable[[], Any], gate_logits: Any, experts: Any, mask: Tensor | None, routing: Routing, divisor: int
) -> Any:
    call = _CALL.get()
    if call is None or not isinstance(gate_logits, tuple):
        return stock()
    batch = call.batch
    if batch.auxiliary == "batch" and not batch.over_ranks:
        return stock()
    if batch.auxiliary == "microbatch":
        return batch.row_mean(stock() * call.rows, call.rows)
    rows = call.rows if batch.auxiliary == "sequence" else 1
    chosen, probabilities, tokens = _statistics(gate_logits, experts, mask, routing, rows)
    if batch.auxiliary == "batch":
        sums = batch.sum(torch.cat([chosen.flatten(), probabilities.flatten(), tokens]))
        chosen, probabilities, tokens = sums[:experts], sums[experts:-1], sums[-1]
        return experts * (chosen * probabilities).sum() / (tokens.square() * divisor)
    # A row of padding alone has no tokens, and adds nothing.
    losses = experts * (chosen * probabilities).sum(-1) / (tokens.square() * divisor).clamp(min=1)
    return batch.row_mean(losses.sum(), rows)


def _statistics(
    gate_logits: tuple[Tensor, ...], experts: int, mask: Tensor | None, routing: Routing, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over layers, for each of `rows` parts of the tokens: choices, probabilities `[rows, experts]`; tokens."""
    device = gate_logits[0].device
    choices = torch.zeros(rows * experts, device=device)
    probability = torch.zeros(rows, experts, device=device)
    tokens = torch.zeros(rows, device=device)
    for logits in gate_logits:
        chosen, weights = routing(logits.to(device))
        counts = torch.ones(len(chosen), device=device) if mask is None else mask.reshape(-1).to(device).float()
        row = torch.arange(rows, device=device).repeat_interleave(len(chosen) // rows)
        index = chosen + row.unsqueeze(-1) * experts
        choices = choices.scatter_add(0, index.flatten(), counts.repeat_interleave(chosen.shape[-1]))
        probability = probability + (weights.float() * counts.unsqueeze(-1)).view(rows, -1, experts).sum(1)
        tokens = tokens + counts.view(rows, -1).sum(1)
    return choices.view(rows, experts), probability, tokens
