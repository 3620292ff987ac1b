"""Per-token values of logits for losses outside a model, over a vocabulary that may be split over the ranks.

Logits exist for one chunk of tokens at a time, in forward and again in backward: a loss may weight each token
arbitrarily, so gradients cannot be computed in the forward as for the model's own loss.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.torch_autograd import called_module
from ..core.communication.collectives import copy_to_ranks, reject_second_derivatives
from ..errors import ConfigError, UnsupportedError
from ..losses.targets import IGNORE_INDEX
from .head_gradients import HeadGradients
from .local_parameters import local_view, weight_in_use
from .sampling import PLAIN, Sampling, ScoreOptions, reduce_over_vocabulary, smallest_kept
from .vocab_parallel_head import ShardedLogits, VocabParallelHead
from .vocab_range import TokensOfRank, require_tokens

LOG_PROBS = "log_probs"
FIELDS = (LOG_PROBS, "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_DIFFERENTIABLE = FIELDS[:2]
# Replaces log(0) where it is multiplied by 0.
_LEAST = -1e30


class DeferredLogits(ShardedLogits):
    """Logits `[batch, sequence, vocab]` of any linear head, not computed yet, split over ranks or not.

    Attributes:
        compute_dtype (`torch.dtype`): dtype in which the head would have computed them.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Any,
        dtype: torch.dtype,
        functions: tuple[Callable[[Tensor], Tensor], ...] = (),
        tokens: TokensOfRank | None = None,
    ):
        super().__init__(hidden, head, functions, tokens)
        self.compute_dtype = dtype

    def _like(self, hidden: Tensor, functions: tuple[Callable[[Tensor], Tensor], ...]) -> "DeferredLogits":
        return DeferredLogits(hidden, self.head, self.compute_dtype, functions, self.tokens)

    def gather(self, *, warn: bool = True) -> Tensor:
        if isinstance(self.head, VocabParallelHead):
            return self._gathered()
        return self.transform(F.linear(self.hidden, weight_in_use(self.head), self.head.bias))


@contextmanager
def deferring(model: Any) -> Iterator[None]:
    """Context in which the model's head, if it is a linear, returns `DeferredLogits`."""
    head = called_module(model.get_output_embeddings())
    if not isinstance(head, nn.Linear):
        yield
        return
    before = vars(head).get("forward")
    part_of = head.part_of if isinstance(head, VocabParallelHead) else None

    def defer(x: Tensor) -> DeferredLogits:
        # Nothing is computed here: the logits keep the head's input.
        hidden, tokens = (x, None) if part_of is None else part_of(x)
        return DeferredLogits(hidden, head, _matmul_dtype(x), tokens=tokens)

    vars(head)["forward"] = defer
    try:
        yield
    finally:
        del vars(head)["forward"]
        if before is not None:
            vars(head)["forward"] = before


def _matmul_dtype(x: Tensor) -> torch.dtype:
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def token_scores(
    logits: Tensor | DeferredLogits, targets: Tensor, field_names: Sequence[str], sampling: Sampling = PLAIN
) -> tuple[Tensor, ...]:
    """Computes fields of `FIELDS`, `[batch, sequence]` each in fp32, 0 where the target is `IGNORE_INDEX`.

    Args:
        logits: `[batch, sequence, vocab]`, as a model returns them.
        targets (`Tensor`): `[batch, sequence]`, the token that each position predicts.
        field_names: fields to return; only log-probabilities and entropy are differentiable.
        sampling (`Sampling`): tokens that cannot be sampled have the log-probability `-inf`, without gradient.
    """
    if targets.shape != logits.shape[:-1]:
        raise ConfigError(
            f"labels of shape {tuple(targets.shape)}, logits for {tuple(logits.shape[:-1])}: they must match."
        )
    tokens = logits.tokens if isinstance(logits, DeferredLogits) else None
    targets = targets.to(logits.device)
    if tokens is not None:
        # Ranks hold different tokens: [batch, sequence] -> [batch, local].
        targets = tokens.own(targets)
    mask = targets != IGNORE_INDEX
    kept = frozenset(field_names) | {LOG_PROBS}
    weight, bias = None, None
    if isinstance(logits, DeferredLogits):
        # [counted tokens, hidden]; ignored tokens get no logits at all.
        head, hidden = logits.head, logits.hidden[mask]
        weight, bias = weight_in_use(head), local_view(head.bias)
        options = ScoreOptions(kept, head.out_features, logits.compute_dtype, logits.transform)
        if isinstance(head, VocabParallelHead):
            size = head.loss_chunk_size or options.chunk_size
            options = replace(options, group=head.group, vocab_start=head.vocab_start, chunk_size=size)
            # Each rank's vocabulary shard yields a partial gradient of the hidden states: all-reduce it.
            hidden = copy_to_ranks(hidden, head.group)
    elif isinstance(logits, Tensor):
        hidden = logits[mask]
        options = ScoreOptions(kept, logits.shape[-1], hidden.dtype)
    else:
        raise UnsupportedError(f"Expected logits, got {type(logits).__name__}: it has no log-probabilities.")
    options = replace(options, sampling=sampling)
    require_tokens(targets, options.vocabulary, "label", IGNORE_INDEX)
    scores = dict(zip(FIELDS, _TokenScores.apply(hidden, weight, bias, targets[mask], options), strict=True))
    values = tuple(scores[name].new_zeros(mask.shape).masked_scatter(mask, scores[name]) for name in field_names)
    if tokens is None:
        return values
    # [batch, local] -> [batch, sequence]; collectives transport fp32, also for booleans.
    return tuple(tokens.join(value.to(torch.float32)).to(value.dtype) for value in values)


def compute_chunk_logits(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Computes logits `[tokens, vocab / tp]` of `[tokens, hidden]`; without a head `x` are the logits."""
    return x if weight is None else F.linear(x, weight, bias)


def _fields(logits: Tensor, columns: Tensor, options: ScoreOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logsumexp `[tokens]` of fp32 `logits` `[tokens, vocab / tp]`, and the wanted fields."""
    rows = logits.shape[1]
    # [tokens]: maximum over the full vocabulary; a rank without entries contributes -inf.
    maximum = logits.max(-1).values if rows else logits.new_full(columns.shape, -torch.inf)
    reduce_over_vocabulary(maximum, options, dist.ReduceOp.MAX)
    shifted = logits - maximum.unsqueeze(-1)
    exponentials = shifted.exp()
    owned, place = _owned(columns, rows)
    # Partial sums over the local vocabulary, [tokens] each; one all-reduce for all of them.
    sums = {
        "all": exponentials.sum(-1),
        "target": shifted.gather(1, place).squeeze(1).masked_fill(~owned, 0) if rows else torch.zeros_like(maximum),
    }
    if "entropy" in options.wanted:
        # A token that cannot be sampled has probability 0 and adds nothing. In place, to save the memory of a chunk.
        sums["entropy"] = torch.linalg.vecdot(exponentials, shifted.clamp_(min=_LEAST))
    if "log_sum_sq_probs" in options.wanted:
        sums["squares"] = exponentials.square().sum(-1)
    if "mean_logits" in options.wanted:
        sums["logits"] = logits.sum(-1)
    stacked = torch.stack(list(sums.values()))
    reduce_over_vocabulary(stacked, options)
    total = dict(zip(sums, stacked, strict=True))
    log_sum = total["all"].log()
    fields = {LOG_PROBS: total["target"] - log_sum}
    if "entropy" in total:
        fields["entropy"] = log_sum - total["entropy"] / total["all"]
    if "squares" in total:
        fields["log_sum_sq_probs"] = total["squares"].log() - 2 * log_sum
    if "logits" in total:
        fields["mean_logits"] = total["logits"] / options.vocabulary
    if "is_top1" in options.wanted:
        # If several tokens are the most likely, the first one counts: the smallest global id over all ranks.
        first = columns.new_full(columns.shape, options.vocabulary)
        if rows:
            best = shifted.max(-1)
            first = torch.where(best.values == 0, best.indices + options.vocab_start, first)
        reduce_over_vocabulary(first, options, dist.ReduceOp.MIN)
        fields["is_top1"] = first == columns + options.vocab_start
    return maximum + log_sum, fields


def _owned(columns: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns whether this rank owns each target `[tokens]`, and the local index of the target `[tokens, 1]`."""
    return (columns >= 0) & (columns < rows), columns.clamp(0, max(rows - 1, 0)).unsqueeze(1)


class _TokenScores(torch.autograd.Function):
    """Maps `hidden` `[tokens, hidden]` and the local head to `FIELDS`, `[tokens]` each; those not wanted are 0.

    Without a weight, `hidden` contains the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, options: ScoreOptions
    ) -> Any:
        columns = targets - options.vocab_start
        parts = [hidden.new_empty(0, dtype=torch.float32)]
        floors = [parts[0]]
        fields: dict[str, list[Tensor]] = {name: [parts[0]] for name in FIELDS[:-1]} | {FIELDS[-1]: [parts[0].bool()]}
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = (None if p is None else p.to(options.dtype) for p in (weight, bias))
            for start in range(0, len(hidden), options.chunk_size):
                # [chunk, hidden] -> [chunk, vocab / tp]
                chunk = slice(start, start + options.chunk_size)
                raw = compute_chunk_logits(hidden[chunk].to(options.dtype), w, b)
                logits = options.scaled(options.transform(raw).float())
                if (floor := smallest_kept(logits, options)) is not None:
                    logits = logits.masked_fill(logits < floor.unsqueeze(-1), -torch.inf)
                    floors.append(floor)
                log_sum, chunk_fields = _fields(logits, columns[chunk], options)
                parts.append(log_sum)
                for name, value in chunk_fields.items():
                    fields[name].append(value)
        log_sums = torch.cat(parts)
        found_fields = tuple(torch.cat(values) for values in fields.values())
        entropy = found_fields[1] if "entropy" in options.wanted else None
        kept = None
        if len(floors) > 1:
            kept = torch.stack([torch.cat(floors), found_fields[0]])
        # Logits are not saved: backward recomputes them from `hidden` and normalizes with the saved log_sums.
        ctx.save_for_backward(hidden, weight, bias, columns, log_sums, entropy, kept)
        ctx.options = options
        ctx.mark_non_differentiable(*found_fields[len(_DIFFERENTIABLE) :])
        # Unwanted fields have no entries: return zeros.
        return tuple(value if len(value) == len(hidden) else value.new_zeros(len(hidden)) for value in found_fields)

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor, of_entropy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        reject_second_derivatives()
        hidden, weight, bias, columns, log_sums, entropy, kept = ctx.saved_tensors
        options = ctx.options
        gradients = HeadGradients(ctx.needs_input_grad, hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = (None if p is None else p.to(options.dtype) for p in (weight, bias))
            for start in range(0, len(hidden), options.chunk_size):
                chunk = slice(start, start + options.chunk_size)
                x = hidden[chunk].to(options.dtype)
                logits = compute_chunk_logits(x, w, b).detach().requires_grad_()
                with torch.enable_grad():
                    transformed = options.transform(logits)
                log_probs = options.scaled(transformed.detach().float())
                upstream = of_log_probs[chunk].unsqueeze(-1)
                # Tokens that sampling excludes have probability 0; a label among them has no gradient.
                if kept is not None:
                    floor, target_log_probs = kept[:, chunk].unsqueeze(-1)
                    log_probs = log_probs.masked_fill(log_probs < floor, -torch.inf)
                    upstream = upstream.where(target_log_probs > -torch.inf, 0)
                log_probs = log_probs - log_sums[chunk].unsqueeze(-1)
                probabilities = log_probs.exp()
                # d log_prob / d logits = onehot(target) - p; d entropy / d logits = -p * (log p + entropy).
                if entropy is None:
                    gradient = probabilities.mul_(-upstream)
                else:
                    # In place, to save the memory of a chunk.
                    gradient = log_probs.clamp_(min=_LEAST).add_(entropy[chunk].unsqueeze(-1))
                    gradient.mul_(of_entropy[chunk].unsqueeze(-1)).add_(upstream).mul_(probabilities).neg_()
                # Only the rank that owns the target adds the one-hot term.
                owned, place = _owned(columns[chunk], gradient.shape[1])
                if gradient.shape[1]:
                    gradient.scatter_add_(1, place, upstream * owned.unsqueeze(-1))
                gradient = options.scaled(gradient).to(transformed.dtype)
                if transformed is not logits:
                    (gradient,) = torch.autograd.grad(transformed, logits, gradient)
                gradients.add(chunk, gradient, x, w)
        return (*gradients.results(), None, None)
