"""Microbatches of a packed sequence: it is split between documents that neither attention nor targets connect.

    packed sequence          a a a a a | b b | c c c c c | d d
    as two microbatches      a a a a a | b b     c c c c c | d d

A document starts where positions restart, as transformers finds documents, and also at a `cu_seq_lens_*` boundary if
the caller passes these. The last token of a document predicts the first one of the next document unless the labels mask
it: the sequence may be split only there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..data_parallel.packed_sequences import POSITIONS, where_positions_begin
from ..losses.targets import IGNORE_INDEX
from .microbatches import batch_size

_TOKENS = 1
_ENDS = {"cu_seq_lens_q": "max_length_q", "cu_seq_lens_k": "max_length_k"}
# Arguments that keep their meaning for part of a sequence. Others may not: `logits_to_keep`, or `is_causal`, which
# attention ignores if there is a mask.
_OF_ANY_PART = frozenset(
    (
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("num_items_in_batch", "ignore_index", *_ENDS.values()),
    )
)


@dataclass(frozen=True)
class PackedRow:
    """One packed sequence of several documents.

    Args:
        arguments: arguments of the call.
        borders: token indices at which it may be split, ascending.
    """

    arguments: Mapping[str, Any]
    borders: tuple[int, ...]

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any]) -> "PackedRow | None":
        """Returns the packed sequence of a call, or `None` if it is not one that can be split."""
        positions = arguments.get(POSITIONS)
        if batch_size(arguments) != 1 or not isinstance(positions, Tensor) or positions.dim() != 2:
            return None
        length = positions.shape[_TOKENS]
        if any(not _can_be_cut(name, value, length) for name, value in arguments.items()):
            return None
        # [tokens]: True for the first token of each document after the first.
        may_cut = where_positions_begin(positions)[0]
        may_cut[0] = False
        if (ends := arguments.get("cu_seq_lens_q")) is not None:
            may_cut &= torch.isin(torch.arange(length, device=may_cut.device), ends.to(may_cut.device))
        labels = arguments.get("labels")
        if arguments.get("shift_labels") is None and labels is not None:
            # Labels are shifted by the loss: the label of a document's first token is the target of the previous token.
            may_cut &= (labels[0] == arguments.get("ignore_index", IGNORE_INDEX)).to(may_cut.device)
        borders = may_cut.nonzero().flatten().tolist()
        return cls(arguments, tuple(borders)) if borders else None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.arguments[POSITIONS].shape[_TOKENS]

    def microbatches(self, count: int) -> list[dict[str, Any]]:
        """Splits the sequence into up to `count` microbatches of nearly equal length, at document borders.

        There are fewer if a document is longer than its share.
        """
        ideal_borders = (self.length * index / count for index in range(1, count))
        nearest = {min((abs(border - place), border) for border in self.borders)[1] for place in ideal_borders}
        return [dict(self._part(start, stop)) for start, stop in pairwise((0, *sorted(nearest), self.length))]

    def _part(self, start: int, stop: int) -> Iterator[tuple[str, Any]]:
        for name, value in self.arguments.items():
            if name in _ENDS and value is not None:
                # Document ends of this microbatch, relative to its first token.
                ends = value[(value >= start) & (value <= stop)] - start
                yield name, ends
                yield _ENDS[name], int(ends.diff().max())
            elif name not in _ENDS.values() or self.arguments.get(_get_ends_name(name)) is None:
                yield name, value[:, start:stop] if isinstance(value, Tensor) and value.dim() > 1 else value


def count_tokens(microbatch: Mapping[str, Any]) -> int:
    """Returns the number of tokens in a microbatch of a packed sequence."""
    return microbatch[POSITIONS].shape[_TOKENS]


def _get_ends_name(longest: str) -> str:
    return next(ends for ends, name in _ENDS.items() if name == longest)


def _can_be_cut(name: str, value: Any, length: int) -> bool:
    if value is None or name in _ENDS or name in _OF_ANY_PART:
        return True
    if not isinstance(value, Tensor):
        return False
    # With an attention mask, even of ones, transformers does not separate the documents.
    return name != "attention_mask" and (value.dim() == 0 or tuple(value.shape[:2]) == (1, length))
