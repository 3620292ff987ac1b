"""Auxiliary losses of routers, over a batch that is split over ranks or microbatches.

The load balancing loss is a product of two means over a batch's tokens, hence not a mean of the losses of its parts:

| `router_aux_loss_scope` | added loss | independent of |
|---|---|---|
| `"batch"` | of the global batch, as in a single process | dp, tp, sp; a pipeline with one microbatch |
| `"sequence"` | mean over sequences of each sequence's loss | every layout and gradient accumulation |
| `"microbatch"` | mean over the microbatches of a batch, weighted by samples | tp, sp |
| `"global"` | choices of the step, times the microbatch's probabilities (Megatron) | layouts, same microbatches |

The z-loss (ST-MoE, 2.2; Megatron's `--moe-z-loss-coeff`) is a mean over tokens, and does not depend on the layout as
long as that weights tokens equally.

transformers keeps a copy of the function in each modeling file with routers; each one is replaced by the function here,
which calls it for models that are not parallelized.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch_loss import BatchLoss

_CALL: ContextVar["_Call | None"] = ContextVar("hf_megatron_router_losses", default=None)

_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids")


@dataclass(frozen=True)
class _Call:
    batch: BatchLoss
    arguments: Mapping[str, Any]

    @property
    def rows(self) -> int:
        denominators = self.batch.microbatch_denominators
        arguments = self.arguments if denominators is None else denominators.arguments
        return next(value.shape[0] for name in _INPUTS if isinstance(value := arguments.get(name), Tensor))


def attach_router_losses(batch: BatchLoss, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Sets the batch of a call's router losses, until the returned function is called."""
    token = _CALL.set(_Call(batch, arguments))
    return lambda: _CALL.reset(token)


def load_balancing_loss(
    original: Callable,
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    """Computes the load balancing loss, a scalar, from a tuple of softmax router logits `[tokens, experts]`."""

    call = _CALL.get()
    if call is None or num_experts is None or not isinstance(gate_logits, tuple):
        return original(gate_logits, num_experts, top_k, attention_mask)
    batch = call.batch
    # Per layer [local tokens, experts] -> [tokens, experts], gathered over the ranks that split a sequence: the sums
    # below need dp ranks only.
    gate_logits = tuple(map(batch.join_tokens, gate_logits))
    loss = _FORMS[batch.aux_loss_scope](original, call, gate_logits, num_experts, top_k, attention_mask)
    if batch.z_loss:
        loss = loss + batch.z_loss * _z_loss(call, gate_logits, attention_mask)
    return loss


def _compute_batch_loss(
    original: Callable, call: "_Call", gate_logits: Any, experts: int, top_k: int, mask: Any
) -> Tensor:
    batch = call.batch
    if not batch.over_ranks:
        loss: Tensor = original(gate_logits, experts, top_k, mask)
        return loss
    # Sums over local tokens: choices and probabilities [experts], tokens [1]; one all-reduce over the batch's ranks.
    chosen, probabilities, tokens = _statistics(gate_logits, experts, top_k, mask, 1)
    sums = batch.sum(torch.cat([chosen.flatten(), probabilities.flatten(), tokens]))
    chosen, probabilities, tokens = sums[:experts], sums[experts:-1], sums[-1]
    # Means over all tokens: experts * sum(choices / tokens * probabilities / tokens).
    return experts * (chosen * probabilities).sum() / tokens.square()


def _of_rows(original: Callable, call: "_Call", gate_logits: Any, experts: int, top_k: int, mask: Any) -> Tensor:
    # Per sequence: choices and probabilities [batch, experts], tokens [batch].
    chosen, probabilities, tokens = _statistics(gate_logits, experts, top_k, mask, call.rows)
    # A sequence of padding only has no tokens, and adds nothing.
    losses = experts * (chosen * probabilities).sum(-1) / tokens.square().clamp(min=1)
    return call.batch.row_mean(losses.sum(), call.rows)


def _compute_microbatch_loss(
    original: Callable, call: "_Call", gate_logits: Any, experts: int, top_k: int, mask: Any
) -> Tensor:
    return call.batch.row_mean(original(gate_logits, experts, top_k, mask) * call.rows, call.rows)


def _compute_step_loss(
    original: Callable, call: "_Call", gate_logits: Any, experts: int, top_k: int, mask: Any
) -> Tensor:
    batch = call.batch
    # Choices of all ranks and calls of the step so far; gradients flow through the local probabilities only.
    chosen, probabilities, tokens = _statistics(gate_logits, experts, top_k, mask, 1)
    counts = batch.accumulate_counts(torch.cat([chosen.flatten(), tokens]).detach())
    total = experts * (counts[:-1] / counts[-1].clamp(min=1) * probabilities[0]).sum()
    return batch.token_share(total, tokens[0], call.rows)


# Loss of a call, by `MegatronConfig.router_aux_loss_scope`.
_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "batch": _compute_batch_loss,
    "sequence": _of_rows,
    "microbatch": _compute_microbatch_loss,
    "global": _compute_step_loss,
}


def _z_loss(call: "_Call", gate_logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """Sums the layers' means over tokens of the squared logsumexp of router logits, a scalar."""
    batch, rows = call.batch, call.rows
    per_row = torch.zeros(rows, device=gate_logits[0].device)
    tokens = torch.zeros(rows, device=gate_logits[0].device)
    for logits in gate_logits:
        counts = torch.ones(len(logits), device=logits.device) if mask is None else mask.reshape(-1).to(logits).float()
        # [tokens], 0 for padding.
        squared = logits.float().logsumexp(-1).square() * counts
        per_row = per_row + squared.view(rows, -1).sum(1).to(per_row.device)
        tokens = counts.view(rows, -1).sum(1).to(tokens.device)
    if batch.aux_loss_scope == "sequence":
        return batch.row_mean((per_row / tokens.clamp(min=1)).sum(), rows)
    if batch.aux_loss_scope == "microbatch":
        return batch.row_mean(per_row.sum() / tokens.sum().clamp(min=1) * rows, rows)
    return batch.token_share(per_row.sum(), tokens.sum(), rows)


def row_mean(original: Callable, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Computes a loss, a scalar, that is a mean over samples already, from `[batch, tokens, experts]` (Switch)."""
    call, loss = _CALL.get(), original(*args, **kwargs)
    if call is None or not (call.batch.over_ranks or call.batch.microbatch_denominators):
        return loss
    rows = len(next(iter((*args, *kwargs.values()))))
    return call.batch.row_mean(loss * rows, rows)


def _statistics(
    gate_logits: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over layers, for each of `rows` sequences: choices and probabilities `[rows, experts]`, tokens `[rows]`."""
    device = gate_logits[0].device
    choices = torch.zeros(rows * experts, device=device)
    probability = torch.zeros(rows, experts, device=device)
    tokens = torch.zeros(rows, device=device)
    for logits in gate_logits:
        weights = F.softmax(logits.to(device), dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices
        counts = torch.ones(len(chosen), device=device) if mask is None else mask.reshape(-1).to(device).float()
        # Index of (sequence, expert) in the flattened counts, for every choice [tokens, top_k].
        row = torch.arange(rows, device=device).repeat_interleave(len(chosen) // rows)
        index = chosen + row.unsqueeze(-1) * experts
        choices = choices.scatter_add(0, index.flatten(), counts.repeat_interleave(chosen.shape[-1]))
        probability = probability + (weights.float() * counts.unsqueeze(-1)).view(rows, -1, experts).sum(1)
        tokens = tokens + counts.view(rows, -1).sum(1)
    return choices.view(rows, experts), probability, tokens
