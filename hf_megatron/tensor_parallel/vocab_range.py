"""Tokens of a vocabulary of which each rank has its own rows: those outside of it, and those that are ruled out."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compat.torch_memory import check_soon


def require_tokens(ids: Tensor, vocabulary: int, what: str, ignore_index: int | None = None) -> None:
    """Raises `IndexError` unless ids of any shape are rows of the vocabulary; on an accelerator the device fails."""
    outside = (ids < 0) | (ids >= vocabulary)
    if ignore_index is not None:
        outside &= ids != ignore_index
    check_soon(
        ~outside.any(),
        lambda: IndexError(f"{what} {int(ids[outside][0])} is out of bounds: there are {vocabulary}, from 0 on."),
    )


def rows_everywhere(index: Any, shape: torch.Size) -> Tensor | None:
    """Returns the tokens `[number]` that an index into logits `shape` names in all places, `None` for any other."""
    *leading, tokens = index if isinstance(index, tuple) else (index,)
    is_everywhere = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in leading)
    reaches_tokens = Ellipsis in leading or len(leading) == len(shape) - 1
    return torch.arange(shape[-1])[tokens].reshape(-1) if is_everywhere and reaches_tokens else None


def filling(tokens: Tensor, value: float, vocab_start: int) -> Callable[[Tensor], Tensor]:
    """Makes the function that sets the logits of some tokens, of a rank's logits `[..., rows]` from `vocab_start`
    on.
    """

    def fill(logits: Tensor) -> Tensor:
        rows = tokens[(tokens >= vocab_start) & (tokens < vocab_start + logits.shape[-1])] - vocab_start
        # The least number of a precision that is wider than the logits'.
        known = max(value, torch.finfo(logits.dtype).min) if math.isfinite(value) else value
        return logits.index_fill(-1, rows.to(logits.device), known)

    return fill


class TokensOfRank(Protocol):
    """The tokens of a row that a rank holds, where several ranks hold some each."""

    @property
    def length(self) -> int:
        """Tokens of the row."""

    def own(self, targets: Tensor) -> Tensor:
        """Keeps this rank's of `[batch, sequence]`: `[batch, held]`."""

    def join(self, tensor: Tensor) -> Tensor:
        """Joins the ranks' `[batch, held, ...]` to `[batch, sequence, ...]`, differentiable."""

    def sum(self, part: Tensor) -> Tensor:
        """Sums a tensor of any shape over the ranks, with its gradient."""
