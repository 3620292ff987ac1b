"""Tokens of a sequence that a rank holds, as seen by the head and the code around the layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers.utils import ModelOutput

from ..core.communication.mean_grad_ops import sum_over_ranks
from .load_balancing import SequenceOrder
from .token_exchange import gather_tokens, take_tokens

_TOKENS = 1


@dataclass(frozen=True, eq=False)
class HeldTokens:
    """Local tokens of a sequence, as the head uses them (`tensor_parallel.vocab_range.TokensOfRank`)."""

    order: SequenceOrder
    group: dist.ProcessGroup

    @property
    def length(self) -> int:
        return self.order.length

    def own(self, targets: Tensor) -> Tensor:
        # [batch, length, ...] -> [batch, local, ...]
        return take_tokens(targets, _TOKENS, self.order, dist.get_rank(self.group))

    def join(self, tensor: Tensor) -> Tensor:
        # [batch, local, ...] -> [batch, length, ...], differentiable.
        return gather_tokens(tensor, _TOKENS, self.order, self.group)

    def sum(self, part: Tensor) -> Tensor:
        return sum_over_ranks(part, self.group)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to all tensors in a layer's arguments or a model's outputs."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, change) for item in value)
    if type(value) is dict:
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, ModelOutput):
        for name, item in value.items():
            value[name] = mapped(item, change)
    return value
