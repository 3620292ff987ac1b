"""transformers' functions of masks as `SequenceMask`, so that no tensor of queries x keys is made of them.

A function of masks is made of closures (`transformers.masking_utils`): causal, windows, chunks, packed documents and
their conjunctions are read from these. Any other is asked, tile by tile.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..compat.transformers_models import mask_parts
from ..errors import UnsupportedError
from .attention import SharedSample
from .masks import SequenceMask


@dataclass(frozen=True, eq=False)
class ContextMask:
    """What stands in the place of a mask `[batch, 1, queries, keys]` where tokens lie on several ranks.

    Args:
        row: where they lie.
        mask: which keys a query sees.
        stock: makes the mask that one process has.
        spreads: queries that see no key get the mean of all values, as from eager attention, not zeros.
    """

    row: SharedSample
    mask: SequenceMask
    stock: Callable[[], Any]
    spreads: bool = False

    def to(self, *args: Any, **kwargs: Any) -> "ContextMask":
        """Casts what one process has."""
        return replace(self, stock=lambda: self.stock().to(*args, **kwargs))

    @property
    def leaves_out_causal(self) -> bool:
        """Whether queries see no later keys, and one process says so by a flag and not by a mask."""
        return bool((self.mask.high < self.mask.length).any()) and self.dense is None

    @property
    def blind(self) -> Tensor | None:
        """Queries that see no key and get the mean of all values, `[batch or 1, length]`, if there are any."""
        return self.mask.blind if self.spreads else None

    @cached_property
    def dense(self) -> Any:
        """The mask of one process, for blocks that are computed on whole rows."""
        return self.stock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported_mask(f"`{name}`")

    def __getitem__(self, index: Any) -> Any:
        raise _unsupported_mask("entries")


def _unsupported_mask(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Attention reads {what} of its mask: with cp_size > 1 it has to hand the mask on to transformers' attention "
        "functions. Load the model with cp_size=1."
    )


def describe_mask(function: Callable, batch: int, length: int, padding: Tensor | None) -> SequenceMask:
    """Returns what a function of masks and padding `[batch, length]` say of a row."""
    mask = _described(function, SequenceMask.full(length), batch, None)
    return mask if padding is None else mask.without(padding.cpu())


def _described(function: Callable, mask: SequenceMask, batch: int, positions: Tensor | None) -> SequenceMask:
    kind, made_of = mask_parts(function)
    places = torch.arange(mask.length).unsqueeze(0)
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
        # Chunks of a document are counted from where it begins.
        mask = mask.chunks(made_of["chunk_size"], begin if positions is None else places - positions + begin)
    elif kind == "documents":
        numbers = made_of["packed_sequence_mask"].cpu()
        borders = torch.zeros(numbers.shape, dtype=torch.bool)
        borders[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        mask = mask.documents(borders)
    elif kind == "padding":
        mask = mask.without(made_of["padding_mask"].cpu())
    elif kind == "positions":
        # Within a document, whose positions go up by one, what is relative is the same.
        mask = _described(made_of["mask_function"], mask, batch, made_of["position_ids"].cpu())
    elif kind != "full":
        rows = torch.arange(batch).view(-1, 1, 1)
        mask = mask.where(lambda queries, keys: _asked(function, rows, queries, keys))
    return mask


def _asked(function: Callable, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    found = function(rows, torch.zeros_like(rows), queries.unsqueeze(0), keys.unsqueeze(0))
    return found.expand(len(rows), queries.shape[0], keys.shape[1])
