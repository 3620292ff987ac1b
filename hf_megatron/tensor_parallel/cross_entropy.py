"""Fused linear head and cross entropy over a vocabulary that is split over the ranks.

For each chunk of tokens the local logits `[tokens, vocab / tp]` are computed, reduced to three values per token
(maximum, sum of exponentials, target logit) by two all-reduces, turned into their own gradient in place and freed.
Neither the full logits nor, with more than one chunk, the local logits of all tokens ever exist.

Source of the reduction: Megatron-LM, `megatron/core/tensor_parallel/cross_entropy.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.torch_autograd import keeps_graph
from ..compat.torch_memory import check_soon, is_async_device
from ..core.communication.collectives import copy_to_ranks, reject_second_derivatives
from ..data_parallel.inplace_edits import Contents
from ..errors import ConfigError
from ..losses.targets import IGNORE_INDEX
from .vocab_range import require_tokens

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Non-tensor arguments of the kernel.

    Args:
        group (`ProcessGroup`, *optional*): the ranks that split the vocabulary; `None` if one rank has all of it.
        vocab_start (`int`): global id of this rank's first vocabulary entry.
        vocabulary (`int`): size of the full vocabulary.
        transform (`Callable`, *optional*): elementwise function of the logits (soft-cap, scale).
        chunk_size (`int`, *optional*): tokens per chunk; all at once by default.
        label_smoothing (`float`): share of the target spread evenly over the vocabulary.
        ignore_index (`int`): target of tokens that are left out of the loss.
        with_gradient (`bool`): compute the gradients in the forward.
    """

    group: dist.ProcessGroup | None
    vocab_start: int
    vocabulary: int
    transform: Transform | None = None
    chunk_size: int | None = None
    label_smoothing: float = 0.0
    ignore_index: int = IGNORE_INDEX
    with_gradient: bool = True


@dataclass
class _Tokens:
    """Cross entropy of one chunk, with the values its gradient is computed from."""

    losses: Tensor  # [tokens]
    exponentials: Tensor  # [tokens, vocab / tp]: exp(logit - maximum), in the buffer that held the logits
    sums: Tensor  # [tokens]: sum of the exponentials over all ranks
    columns: Tensor  # [tokens]: local index of the target; arbitrary if another rank owns it
    owned: Tensor  # [tokens]: whether this rank owns the target's vocabulary entry

    def gradient(self, weights: Tensor, options: "CrossEntropyOptions") -> Tensor:
        """Returns the logits' gradient `[tokens, vocab / tp]` for losses weighted by `weights` `[tokens]`; in place."""
        # d loss / d logits = softmax - smoothed one-hot target. The softmax denominator covers the full vocabulary.
        gradient = self.exponentials.mul_((weights / self.sums).unsqueeze(-1))
        if options.label_smoothing:
            gradient -= (weights * (options.label_smoothing / options.vocabulary)).unsqueeze(-1)
        # A rank may own no vocabulary entry.
        if gradient.shape[1]:
            hit = weights * self.owned * (options.label_smoothing - 1)
            gradient.scatter_add_(1, self.columns.unsqueeze(1), hit.unsqueeze(1))
        return gradient


def _token_losses(logits: Tensor, targets: Tensor, options: CrossEntropyOptions) -> _Tokens:
    """Computes the losses of fp32 `logits` `[tokens, vocab / tp]`, which are overwritten."""
    tokens, rows = logits.shape
    # [tokens]: maximum over the full vocabulary; a rank without entries contributes -inf.
    maximum = logits.max(-1).values if rows else logits.new_full((tokens,), -torch.inf)
    if options.group is not None:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=options.group)
    shifted = logits.sub_(maximum.unsqueeze(-1))

    # Local index of each target, clamped to a valid one where another rank owns it.
    columns = targets - options.vocab_start
    owned = (columns >= 0) & (columns < rows)
    columns = columns.clamp(0, max(rows - 1, 0))
    # [2 or 3, tokens]: sum of exponentials, target logit, and with label smoothing the sum of logits; each rank adds
    # what it owns, so that a single all-reduce yields all of them for the full vocabulary.
    sums = shifted.new_zeros(3 if options.label_smoothing else 2, tokens)
    if rows:
        sums[1] = shifted.gather(1, columns.unsqueeze(1)).squeeze(1).masked_fill(~owned, 0)
    if options.label_smoothing:
        sums[2] = shifted.sum(-1)
    # In place: the logits' buffer now holds the exponentials [tokens, vocab / tp].
    exponentials = shifted.exp_()
    sums[0] = exponentials.sum(-1)
    if options.group is not None:
        dist.all_reduce(sums, group=options.group)

    # loss = log(sum of exponentials) - target logit, both relative to the maximum, which cancels.
    log_sum = sums[0].log()
    losses = log_sum - sums[1]
    if options.label_smoothing:
        uniform = log_sum - sums[2] / options.vocabulary
        losses = losses + options.label_smoothing * (uniform - losses)
    return _Tokens(losses, exponentials, sums[0], columns, owned)


def _forward(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    options: CrossEntropyOptions,
) -> Tensor:
    """Returns the loss; stores the gradients for an upstream gradient of 1 in `ctx.gradients`."""
    needs_hidden, needs_weight, needs_bias = (needed and options.with_gradient for needed in ctx.needs_input_grad[:3])
    tokens = hidden.shape[0]
    # Peak memory is one chunk of logits: [chunk_size, vocab / tp].
    chunk_size = options.chunk_size or max(tokens, 1)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if needs_hidden else None
    d_weight: Tensor | None = None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None

    for start in range(0, tokens, chunk_size):
        x, chunk_targets = hidden[start : start + chunk_size], targets[start : start + chunk_size]
        valid = chunk_targets != options.ignore_index
        # [chunk, hidden] -> [chunk, vocab / tp]
        logits = torch.nn.functional.linear(x, weight, bias)
        transformed = logits
        if options.transform is not None:
            # Only the transform is recorded; its backward runs below, before the next chunk.
            with torch.enable_grad():
                logits.requires_grad_(options.with_gradient)
                transformed = options.transform(logits)
        values = transformed.detach().float()
        if options.transform is not None and values.data_ptr() == transformed.data_ptr():
            # The kernel overwrites `values`, which the transform may have saved for its backward.
            values = values.clone()
        result = _token_losses(values, chunk_targets, options)
        # Replicated: every rank computes the losses of all tokens.
        total += result.losses.masked_fill(~valid, 0).sum() * scale
        if not (needs_hidden or needs_weight or needs_bias):
            continue

        # Without any label the scale is infinite; ignored tokens still add 0 to the gradient, as in a single process.
        gradient = result.gradient(torch.where(valid, scale, 0.0), options).to(transformed.dtype)
        if options.transform is not None:
            (gradient,) = torch.autograd.grad(transformed, logits, gradient)
        gradient = gradient.to(weight.dtype)
        if d_hidden is not None:
            # A partial sum over this rank's vocabulary; `copy_to_ranks` all-reduces it in the backward.
            torch.mm(gradient, weight, out=d_hidden[start : start + chunk_size])
        if needs_weight:
            # Chunks accumulate in fp32; a single chunk needs no wider buffer.
            part = gradient.t() @ x
            if d_weight is None:
                d_weight = part if chunk_size >= tokens else part.float()
            else:
                d_weight += part
        if d_bias is not None:
            d_bias += gradient.sum(0)

    # No tokens at all.
    if needs_weight and d_weight is None:
        d_weight = torch.zeros_like(weight)
    ctx.gradients = (d_hidden, d_weight, d_bias)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
        ctx.upstream = None
        # Nothing is saved whose version autograd would check, since the gradients exist already; backward checks it.
        ctx.weight, ctx.version = weight, weight._version
        ctx.contents = Contents([weight] if ctx.needs_input_grad[0] else [])
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            # Like autocast around the head alone: matmuls in its dtype, everything else in fp32.
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            with torch.autocast(device_type, enabled=False):
                return _forward(ctx, hidden, weight, bias, *others)
        return _forward(ctx, hidden, weight, bias, *others)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        reject_second_derivatives()
        if ctx.needs_input_grad[0] and ctx.weight._version != ctx.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                "weight of the head was edited between the forward and its backward. Edit weights after backward()."
            )
        ctx.contents.check("the weight of the head")
        if ctx.gradients is None:
            raise RuntimeError(
                "The vocab-parallel loss was backpropagated twice. Use backward(retain_graph=True) first."
            )
        if ctx.upstream is None:
            # Comparing with 1 on the host would synchronize with an accelerator; there the gradients are always scaled.
            scaled = is_async_device(upstream.device) or upstream.item() != 1.0
            ctx.gradients = [
                None if gradient is None else (gradient.mul_(upstream) if scaled else gradient).to(dtype)
                for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
            ]
        elif is_async_device(upstream.device) or not torch.equal(ctx.upstream, upstream):
            # Second backward of a kept graph: the gradients carry the factor of the first one.
            same = ctx.upstream == upstream
            check_soon(
                same | (ctx.upstream != 0),
                lambda: RuntimeError(
                    "The vocab-parallel loss was backpropagated with gradient 0, then with a nonzero one; its "
                    "gradients are already scaled to 0. Compute the loss again."
                ),
            )
            ratio = torch.where(same, 1.0, upstream / ctx.upstream)
            ctx.gradients = [None if gradient is None else gradient * ratio for gradient in ctx.gradients]
        gradients = ctx.gradients
        # With `retain_graph` another backward may follow, as of the inputs first and of the weights later.
        ctx.gradients, ctx.upstream = (gradients, upstream) if keeps_graph() else (None, None)
        if ctx.gradients is not None:
            # Autograd may accumulate into the tensors that it receives.
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        return (*gradients, None, None, None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    denominator: Tensor | int | float | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T + bias`, summed over the tokens and divided by `denominator`.

    Args:
        hidden (`Tensor`): `[tokens, hidden]`, identical on every rank.
        weight (`Tensor`): this rank's shard of the head, `[vocab / tp, hidden]`.
        bias (`Tensor`, *optional*): `[vocab / tp]`.
        targets (`Tensor`): `[tokens]`, global vocabulary ids or `options.ignore_index`.
        denominator (`Tensor` or number, *optional*): by default the number of targets that are not ignored; if there
            are none the loss is NaN, as in `torch.nn.functional.cross_entropy`.
        options (`CrossEntropyOptions`): non-tensor arguments.

    Returns:
        `Tensor`: a scalar in fp32, identical on every rank. A second backward needs `retain_graph=True`.
    """
    if hidden.shape[0] != targets.shape[0]:
        raise ConfigError(f"labels have {targets.shape[0]} entries, the logits {hidden.shape[0]}; they must match.")
    require_tokens(targets, options.vocabulary, "label", options.ignore_index)
    if denominator is None:
        denominator = (targets != options.ignore_index).sum()
    scale = 1.0 / torch.as_tensor(denominator, device=hidden.device, dtype=torch.float32)
    # Without targets the scale is infinite, and 0 * inf is the NaN that a single process returns.
    if options.group is not None:
        hidden = copy_to_ranks(hidden, options.group)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, options)
