"""Per-token divergence between the predictions of two models, over a vocabulary that may be split over the ranks.

    beta 0          forward   KL(teacher || student)
    beta 1          reverse   KL(student || teacher)
    in between      generalized Jensen-Shannon (Agarwal et al., 2023): beta KL(teacher || mixture) +
                    (1 - beta) KL(student || mixture), with the mixture beta teacher + (1 - beta) student

Logits of both models exist for one chunk of tokens at a time, in forward and again in backward.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.communication.collectives import copy_to_ranks, reject_second_derivatives
from ..errors import ConfigError
from ..losses.targets import IGNORE_INDEX
from .head_gradients import HeadGradients
from .local_parameters import local_view, weight_in_use
from .sampling import Sampling, ScoreOptions, reduce_over_vocabulary
from .vocab_log_probs import DeferredLogits, compute_chunk_logits
from .vocab_parallel_head import VocabParallelHead


@dataclass(frozen=True)
class Teacher:
    """Teacher predictions, as its last hidden states.

    Args:
        hidden (`Tensor`): `[batch, sequence, hidden]`, on every rank.
        logits (`DeferredLogits`): of its last call or microbatch; provides head, dtype and transform.
        full_lm_head: context in which the head is gathered, if the ranks hold shards of it at rest.
        copy (*optional*): this tp rank's head and bias, gathered over ZeRO-3 ranks, if not all of these take part in
            reading them.
    """

    hidden: Tensor
    logits: DeferredLogits
    full_lm_head: Callable[[], AbstractContextManager[None]]
    copy: tuple[Tensor, Tensor | None] | None = None

    def rows(self, vocab_start: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Returns `count` vocabulary entries of the head, `[count, hidden]`, and of its bias, from `vocab_start` on."""
        head = self.logits.head
        weight = weight_in_use(head) if self.copy is None else self.copy[0]
        bias = local_view(head.bias) if self.copy is None else self.copy[1]
        start = head.vocab_start if isinstance(head, VocabParallelHead) else 0
        here = slice(vocab_start - start, vocab_start - start + count)
        assert here.start >= 0 and here.stop <= len(weight), (head, vocab_start, count)
        return weight[here], None if bias is None else bias[here]


@dataclass(frozen=True)
class _Options:
    """Arguments of the kernel other than the student's tensors.

    Args:
        student, teacher: how their logits are computed; both have the student's group and vocabulary range.
        rows: returns the teacher's local head and bias.
        full_lm_head: context in which the teacher's head is gathered.
    """

    beta: float
    student: ScoreOptions
    teacher: ScoreOptions
    rows: Callable[[], tuple[Tensor, Tensor | None]]
    full_lm_head: Callable[[], AbstractContextManager[None]]


def divergences(
    logits: DeferredLogits, teacher: Teacher, targets: Tensor, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Computes the divergence and the student's entropy, `[batch, sequence]` in fp32, 0 where a target is ignored.

    Args:
        logits: of the student.
        teacher: with hidden states `[batch, sequence, hidden]` of the same tokens.
        targets (`Tensor`): `[batch, sequence]`; `IGNORE_INDEX` where a token does not count.
        beta (`float`): 0 to 1.
        temperature (`float`): divisor of both models' logits.

        Returns:
        `(Tensor, Tensor)`: the entropy has no gradient.
    """
    head, of_teacher = logits.head, teacher.logits.head
    if head.out_features != of_teacher.out_features:
        raise ConfigError(
            f"The student's vocabulary has {head.out_features} tokens, the teacher's {of_teacher.out_features}; their "
            "divergence needs the same vocabulary."
        )
    tokens, hidden = logits.tokens, teacher.hidden
    if tokens is not None:
        # Ranks hold different tokens: [batch, sequence, ...] -> [batch, local, ...].
        targets, hidden = tokens.own(targets), tokens.own(hidden)
    mask = targets != IGNORE_INDEX
    weight = weight_in_use(head)
    bias = local_view(head.bias)
    student = ScoreOptions(
        frozenset(), head.out_features, logits.compute_dtype, logits.transform, Sampling(temperature)
    )
    # [counted tokens, hidden]
    student_hidden = logits.hidden[mask]
    if isinstance(head, VocabParallelHead):
        chunk = head.loss_chunk_size or student.chunk_size
        student = replace(student, group=head.group, vocab_start=head.vocab_start, chunk_size=chunk)
        # Each rank's vocabulary shard yields a partial gradient of the hidden states: all-reduce it.
        student_hidden = copy_to_ranks(student_hidden, head.group)
    options = _Options(
        beta,
        student,
        replace(student, dtype=teacher.logits.compute_dtype, transform=teacher.logits.transform),
        lambda: teacher.rows(student.vocab_start, len(weight)),
        teacher.full_lm_head,
    )
    divergence_terms = _TokenDivergences.apply(student_hidden, weight, bias, hidden[mask], options)
    values = tuple(value.new_zeros(mask.shape).masked_scatter(mask, value) for value in divergence_terms)
    # [batch, local] -> [batch, sequence]
    if tokens is not None:
        values = tuple(tokens.join(value) for value in values)
    return values[0], values[1]


def _log_sums(logits: Tensor, options: ScoreOptions) -> Tensor:
    """Returns the logsumexp over the full vocabulary `[models, tokens]` of `[models, tokens, vocab / tp]`."""
    # A rank without vocabulary entries contributes -inf to the maximum and 0 to the sum.
    # Two all-reduces of [models, tokens]: the maximum, then the sum of exponentials relative to it.
    maximum = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    reduce_over_vocabulary(maximum, options, dist.ReduceOp.MAX)
    total = (logits - maximum.unsqueeze(-1)).exp().sum(-1)
    reduce_over_vocabulary(total, options)
    return maximum + total.log()


def _expected(log_probs: Tensor, values: Tensor) -> Tensor:
    """Returns the expectation of `values` `[tokens, vocab / tp]`; tokens of probability 0 add nothing, even inf."""
    return torch.where(log_probs > -torch.inf, log_probs.exp() * values, 0).sum(-1)


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))


class _TokenDivergences(torch.autograd.Function):
    """Maps `hidden` `[tokens, hidden]` and the student's local head to divergence and entropy `[tokens]`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, of_teacher: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        # Per token: two logsumexps, divergence, student's divergence from its reference, entropy.
        parts = [hidden.new_empty((5, 0), dtype=torch.float32)]
        with torch.autocast(hidden.device.type, enabled=False), options.full_lm_head():
            heads = _heads(weight, bias, options)
            for start in range(0, len(hidden), options.student.chunk_size):
                chunk = slice(start, start + options.student.chunk_size)
                # [2, chunk, vocab / tp]; `sums` is [2, chunk] over the full vocabulary.
                both = torch.stack(_both(hidden[chunk], of_teacher[chunk], heads, options))
                sums = _log_sums(both, options.student)
                student, teacher = both - sums.unsqueeze(-1)
                # [3, chunk]: partial sums over the local vocabulary, all-reduced at once.
                terms = torch.stack([*_terms(student, teacher, options.beta), -_expected(student, student)])
                reduce_over_vocabulary(terms, options.student)
                parts.append(torch.cat([sums, terms]))
        student_sums, teacher_sums, divergence, of_student, entropy = torch.cat(parts, 1)
        ctx.save_for_backward(hidden, weight, bias, of_teacher, student_sums, teacher_sums, of_student)
        ctx.options = options
        ctx.mark_non_differentiable(entropy)
        return divergence.contiguous(), entropy.contiguous()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        reject_second_derivatives()
        hidden, weight, bias, of_teacher, student_sums, teacher_sums, of_student = ctx.saved_tensors
        options: _Options = ctx.options
        beta = options.beta
        # Logits of both models are recomputed chunk by chunk and normalized with the saved logsumexps.
        gradients = HeadGradients(ctx.needs_input_grad, hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False), options.full_lm_head():
            heads = _heads(weight, bias, options)
            for start in range(0, len(hidden), options.student.chunk_size):
                chunk = slice(start, start + options.student.chunk_size)
                x = hidden[chunk].to(options.student.dtype)
                # Recomputed: [chunk, vocab / tp].
                raw = compute_chunk_logits(x, *heads[0]).detach().requires_grad_()
                with torch.enable_grad():
                    transformed = options.student.transform(raw)
                # Log-probabilities [chunk, vocab / tp] of the local vocabulary entries.
                student = options.student.scaled(transformed.detach().float()) - student_sums[chunk].unsqueeze(-1)
                teacher = _logits(of_teacher[chunk], heads[1], options.teacher) - teacher_sums[chunk].unsqueeze(-1)
                probabilities = student.exp()
                # Gradient by the student's logits, a closed form that needs no further collective:
                # KL(teacher || student): p_student - p_teacher; otherwise p_student * (log ratio - its expectation).
                if beta == 0:
                    gradient = probabilities - teacher.exp()
                else:
                    against = teacher if beta == 1 else _mixture(student, teacher, beta)
                    weighted = student - against - of_student[chunk].unsqueeze(-1)
                    gradient = torch.where(probabilities > 0, probabilities * weighted, 0)
                    gradient *= 1 if beta == 1 else 1 - beta
                gradient = options.student.scaled(gradient * upstream[chunk].unsqueeze(-1)).to(transformed.dtype)
                if transformed is not raw:
                    (gradient,) = torch.autograd.grad(transformed, raw, gradient)
                gradients.add(chunk, gradient, x, heads[0][0])
        return (*gradients.results(), None, None)


_Head = tuple[Tensor, Tensor | None]


def _heads(weight: Tensor, bias: Tensor | None, options: _Options) -> tuple[_Head, _Head]:
    """Returns the student's and the teacher's local heads in the dtypes of their matmuls."""
    heads = []
    for (w, b), of in (((weight, bias), options.student), (options.rows(), options.teacher)):
        heads.append((w.to(of.dtype), None if b is None else b.to(of.dtype)))
    return heads[0], heads[1]


def _logits(hidden: Tensor, head: _Head, options: ScoreOptions) -> Tensor:
    return options.scaled(options.transform(compute_chunk_logits(hidden.to(options.dtype), *head)).float())


def _both(hidden: Tensor, of_teacher: Tensor, heads: tuple[_Head, _Head], options: _Options) -> tuple[Tensor, Tensor]:
    return _logits(hidden, heads[0], options.student), _logits(of_teacher, heads[1], options.teacher)


def _terms(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns local partial sums `[tokens]` of the divergence, and of the student's divergence from its reference."""
    if beta == 0:
        divergence = _expected(teacher, teacher - student)
        return divergence, torch.zeros_like(divergence)
    if beta == 1:
        divergence = _expected(student, student - teacher)
        return divergence, divergence
    mixture = _mixture(student, teacher, beta)
    of_student = _expected(student, student - mixture)
    return beta * _expected(teacher, teacher - mixture) + (1 - beta) * of_student, of_student
