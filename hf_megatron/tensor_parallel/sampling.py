"""Sampling distribution over a split vocabulary: temperature, top-k and top-p, as in transformers' generation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError

_TOKENS_PER_CHUNK = 1024


@dataclass(frozen=True)
class Sampling:
    """Distribution from which tokens are sampled. The fields are applied in this order, as in transformers' generation.

    Args:
        temperature (`float`): divisor of the logits.
        top_k (`int`, *optional*): keep the k most likely tokens, and any as likely as the last of them.
        top_p (`float`, *optional*): keep the most likely tokens, as many as needed to reach this total probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature = {self.temperature}: expected more than 0.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k = {self.top_k}: expected None or 1 or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}: expected None or more than 0 and at most 1.")


PLAIN = Sampling()


@dataclass(frozen=True)
class ScoreOptions:
    """Non-tensor arguments of the kernels.

    Args:
        wanted: fields of `FIELDS`; the log-probabilities are always computed.
        vocabulary (`int`): size of the full vocabulary.
        dtype (`torch.dtype`): of the matmuls.
        transform (`Callable`): elementwise function of the logits.
        sampling (`Sampling`): applied afterwards, in fp32.
        group (`ProcessGroup`, *optional*): the ranks that split the vocabulary.
        vocab_start (`int`): global id of this rank's first vocabulary entry.
        chunk_size (`int`): tokens per chunk.
    """

    wanted: frozenset[str]
    vocabulary: int
    dtype: torch.dtype
    transform: Callable[[Tensor], Tensor] = lambda logits: logits
    sampling: Sampling = PLAIN
    group: dist.ProcessGroup | None = None
    vocab_start: int = 0
    chunk_size: int = _TOKENS_PER_CHUNK

    def scaled(self, logits: Tensor) -> Tensor:
        """Divides fp32 logits, or their gradient, `[tokens, vocab / tp]` by the temperature."""
        temperature = self.sampling.temperature
        return logits if temperature == 1.0 else logits / temperature


def smallest_kept(logits: Tensor, options: ScoreOptions) -> Tensor | None:
    """Returns the smallest logit `[tokens]` that can still be sampled, given fp32 logits `[tokens, vocab / tp]`."""
    top_k, top_p, floor = options.sampling.top_k, options.sampling.top_p, None
    if top_k is not None:
        # Top-p applies to the tokens that top-k has kept.
        floor = _largest(logits, min(top_k, options.vocabulary), options)
        logits = logits.masked_fill(logits < floor.unsqueeze(-1), -torch.inf)
    if top_p is None or top_p == 1:
        return floor
    # [tokens]: softmax maximum over the full vocabulary, for unnormalized probabilities `masses`.
    maximum = logits.max(-1).values if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
    reduce_over_vocabulary(maximum, options, dist.ReduceOp.MAX)
    masses = (logits - maximum.unsqueeze(-1)).exp()
    # [tokens]: the probability mass that the kept tokens of all ranks have to reach.
    needed = masses.sum(-1)
    reduce_over_vocabulary(needed, options)
    needed = needed * top_p
    # Binary search for the largest threshold that keeps enough mass, over floats mapped to integers in the same order:
    # one step per bit, each with one all-reduce of [tokens].
    keys = _ordered(logits)
    low, high = keys.new_full(maximum.shape, -(2**31)), _ordered(maximum)
    for _ in range(33):
        middle = low + (high - low + 1).div(2, rounding_mode="floor")
        # [tokens]: local mass above the threshold, summed over the vocabulary of all ranks.
        mass = torch.where(keys >= middle.unsqueeze(-1), masses, 0).sum(-1)
        reduce_over_vocabulary(mass, options)
        is_enough = mass >= needed
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle - 1)
    # The smallest kept logit over the full vocabulary.
    kept = torch.where(keys >= low.unsqueeze(-1), logits, torch.inf)
    threshold = kept.min(-1).values if logits.shape[1] else torch.full_like(maximum, torch.inf)
    reduce_over_vocabulary(threshold, options, dist.ReduceOp.MIN)
    return threshold


def _ordered(values: Tensor) -> Tensor:
    """Maps fp32 to integers in the same order."""
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits)


def _largest(logits: Tensor, place: int, options: ScoreOptions) -> Tensor:
    """Returns the `place`-th largest logit `[tokens]` over all ranks' `[tokens, vocab / tp]`."""
    # The global top-k is among the local ones: gather [tokens, place] from each rank, -inf where it owns fewer.
    top_logits = logits.topk(min(place, logits.shape[1])).values
    if options.group is not None:
        top_logits = F.pad(top_logits, (0, place - top_logits.shape[1]), value=-torch.inf).contiguous()
        parts = [torch.empty_like(top_logits) for _ in range(options.group.size())]
        dist.all_gather(parts, top_logits, group=options.group)
        top_logits = torch.cat(parts, 1)
    return top_logits.topk(place).values[:, -1]


def reduce_over_vocabulary(tensor: Tensor, options: ScoreOptions, operation: Any = dist.ReduceOp.SUM) -> None:
    """Reduces a tensor of any shape, in place, over the ranks that split the vocabulary."""
    if options.group is not None:
        dist.all_reduce(tensor, op=operation, group=options.group)
