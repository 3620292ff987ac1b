"""Token ids in a split vocabulary: range checks, and logits that a model masks out."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.torch_memory import check_soon


def require_tokens(
    ids: Tensor, vocabulary: int, what: str, ignore_index: int | None = None, *, are_classes: bool = False
) -> None:
    """Raises `IndexError` if ids, of any shape, are outside the vocabulary; an accelerator asserts asynchronously.

    Args:
        are_classes (`bool`, defaults to `False`): whether the vocabulary is a classifier's number of classes.
    """
    outside = (ids < 0) | (ids >= vocabulary)
    if ignore_index is not None:
        outside &= ids != ignore_index
    check_soon(
        ~outside.any(),
        lambda: IndexError(
            f"{what} {int(ids[outside][0])} is out of bounds for "
            + (f"{vocabulary} classes." if are_classes else f"a vocabulary of {vocabulary} tokens.")
        ),
    )


def require_class_indices(targets: Tensor) -> None:
    """Raises the error of torch for targets, of any shape, of a dtype that its cross entropy does not take (int32)."""
    if targets.dtype != torch.int64:
        # One token and two classes; torch decides, and its message stays the same.
        F.cross_entropy(torch.zeros(1, 2, device=targets.device), targets.new_zeros(1))


def rows_everywhere(index: Any, shape: torch.Size) -> Tensor | None:
    """Returns the token ids `[n]` that an index into logits of `shape` selects at all positions; `None` for others."""
    *leading, tokens = index if isinstance(index, tuple) else (index,)
    is_everywhere = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in leading)
    reaches_tokens = Ellipsis in leading or len(leading) == len(shape) - 1
    return torch.arange(shape[-1])[tokens].reshape(-1) if is_everywhere and reaches_tokens else None


def filling(tokens: Tensor, value: float, vocab_start: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that sets the logits of `tokens` in local logits `[..., vocab / tp]` from `vocab_start`."""

    def fill(logits: Tensor) -> Tensor:
        # Only the tokens that this rank owns, as local indices.
        rows = tokens[(tokens >= vocab_start) & (tokens < vocab_start + logits.shape[-1])] - vocab_start
        # The lowest finite value of a wider precision would overflow in the logits' dtype.
        known = max(value, torch.finfo(logits.dtype).min) if math.isfinite(value) else value
        return logits.index_fill(-1, rows.to(logits.device), known)

    return fill


class TokensOfRank(Protocol):
    """Tokens of a sequence that one rank holds, if several ranks split the sequence."""

    @property
    def length(self) -> int:
        """Tokens of the full sequence."""

    def own(self, targets: Tensor) -> Tensor:
        """Returns this rank's tokens of `[batch, sequence]`: `[batch, local]`."""

    def join(self, tensor: Tensor) -> Tensor:
        """Gathers the ranks' `[batch, local, ...]` to `[batch, sequence, ...]`, differentiable."""

    def sum(self, part: Tensor) -> Tensor:
        """Sums a tensor of any shape over the ranks, differentiable."""
