"""Conversion of transformers' mask functions to `SequenceMask`, without a tensor of queries x keys.

A mask function consists of nested closures (`transformers.masking_utils`): causal, window, chunk and packed-document
masks and their conjunctions are read from these. Any other function is evaluated tile by tile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..compat.transformers_models import mask_parts
from ..core.runtime import RUNTIME, keep_by_number
from ..errors import UnsupportedError
from .attention import TokenLayout
from .masks import SequenceMask

_numbers = count()


def _new_number() -> Tensor:
    return torch.tensor(next(_numbers))


@dataclass(frozen=True, eq=False)
class ContextMask:
    """Replaces the mask `[batch, 1, queries, keys]` of a sequence that is split over ranks.

    Args:
        token_layout: distribution of the sequence.
        mask: which keys a query sees.
        stock: creates the single-process mask.
        spreads: queries that see no key get the mean of all values, as from eager attention, not zeros.
        number (`Tensor`, *optional*): int64 `[]` on the host, by which compiled layers refer to the mask; the compiler
            does not specialize on a tensor's value.
    """

    token_layout: TokenLayout
    mask: SequenceMask
    stock: Callable[[], Any]
    spreads: bool = False
    number: Tensor | None = field(default_factory=_new_number)

    def __post_init__(self) -> None:
        if self.number is not None:
            # Known as long as the number's memory exists, which compiled layers save for their recomputation.
            keep_by_number(RUNTIME.context_masks, self.number, replace(self, number=None))

    def to(self, *args: Any, **kwargs: Any) -> "ContextMask":
        """Casts the single-process mask."""
        stock = lambda: self.stock().to(*args, **kwargs)  # noqa: E731
        return ContextMask(self.token_layout, self.mask, stock, self.spreads)

    @property
    def leaves_out_causal(self) -> bool:
        """Whether queries see no later keys, but the single process uses a flag (`is_causal`) instead of a mask."""
        return bool((self.mask.high < self.mask.length).any()) and self.dense is None

    @property
    def fully_masked(self) -> Tensor | None:
        """Queries that see no key and get the mean of all values, `[batch or 1, length]`; `None` if there are none."""
        return self.mask.fully_masked if self.spreads else None

    @cached_property
    def dense(self) -> Any:
        """Single-process mask, for blocks that are computed on full sequences."""
        return self.stock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported_mask(f"`{name}`")

    def __getitem__(self, index: Any) -> Any:
        raise _unsupported_mask("entries")


def _unsupported_mask(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Attention reads {what} of its mask: with cp_size > 1 it has to pass the mask on to transformers' attention "
        "functions. Load the model with cp_size=1."
    )


def describe_mask(function: Callable, batch: int, length: int, padding: Tensor | None) -> SequenceMask:
    """Returns the mask that a mask function and padding `[batch, length]` describe."""
    mask = _described(function, SequenceMask.full(length), batch, None)
    return mask if padding is None else mask.without(padding.cpu())


def _described(function: Callable, mask: SequenceMask, batch: int, positions: Tensor | None) -> SequenceMask:
    kind, made_of = mask_parts(function)
    places = torch.arange(mask.length).unsqueeze(0)
    # A conjunction restricts the mask step by step.
    if kind == "and":
        for part in made_of["mask_functions"]:
            mask = _described(part, mask, batch, positions)
    elif kind == "causal":
        mask = mask.within(0, places + 1)
    elif kind == "window":
        mask = mask.window(made_of["sliding_window"])
    elif kind == "window to both sides":
        size = made_of["sliding_window"]
        mask = mask.within(places - size, places + size + 1)
    elif kind == "chunks":
        begin = made_of["left_padding"].cpu().view(-1, 1)
        # Chunks of a packed document are counted from its start.
        mask = mask.chunks(made_of["chunk_size"], begin if positions is None else places - positions + begin)
    elif kind == "documents":
        document_ids = made_of["packed_sequence_mask"].cpu()
        borders = torch.zeros(document_ids.shape, dtype=torch.bool)
        borders[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        mask = mask.documents(borders)
    elif kind == "padding":
        mask = mask.without(made_of["padding_mask"].cpu())
    elif kind == "positions":
        # Positions increase by one within a document, so relative distances are the same.
        mask = _described(made_of["mask_function"], mask, batch, made_of["position_ids"].cpu())
    elif kind != "full":
        rows = torch.arange(batch).view(-1, 1, 1)
        # Unknown function: evaluated per tile, [batch, queries, keys].
        mask = mask.where(lambda queries, keys: _asked(function, rows, queries, keys))
    return mask


def _asked(function: Callable, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    visible = function(rows, torch.zeros_like(rows), queries.unsqueeze(0), keys.unsqueeze(0))
    return visible.expand(len(rows), queries.shape[0], keys.shape[1])
