"""Cache of packing information per forward: whether masks hide tokens, and whether positions restart.

transformers reads both from the device for every mask it builds, in a pipeline for each microbatch, and each read makes
the host wait. Here they are read once per forward, with the first mask, for all microbatches. How transformers uses
them does not change. Positions that the model counts itself restart in no sequence and need not be read.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat.shared import Shared
from ..core.runtime import RUNTIME
from ..parallel_state import ParallelState, parallel_state

_MASK = "attention_mask"
POSITIONS = "position_ids"


class PackingInfo:
    """Masks `[batch, tokens]` and positions `[batch, tokens]` of a call's microbatches, with one cached flag for each.

    Args:
        microbatches: arguments of each microbatch.

    Attributes:
        finds_documents: whether the attention implementation has looked for documents in the positions of the call.
    """

    def __init__(self, microbatches: Sequence[Mapping[str, Any]]):
        inputs = [microbatch.get(name) for microbatch in microbatches for name in (_MASK, POSITIONS)]
        self._given = [value if isinstance(value, Tensor) and value.dim() == 2 else None for value in inputs]
        self._masks: dict[int, tuple[Tensor, int]] = {}
        self._answers: list[bool] | None = None
        self.finds_documents = False

    def hides_tokens(self, mask: Tensor) -> bool | None:
        """Returns whether a mask that was made from one of the call's masks hides tokens; `None` for other masks."""
        _, place = self._masks.get(id(mask), (None, None))
        return None if place is None else self._answer(place)

    def begins_anew(self, positions: Tensor) -> bool | None:
        """Returns whether positions `[batch, tokens]` of the call restart within a sequence; `None` for others."""
        place = self._place(positions, 1)
        self.finds_documents |= place is not None
        return None if place is None else self._answer(place)

    def note_mask(self, mask: Any, prepared_mask: Any) -> None:
        """Records the mask that transformers made from one of the call's masks."""
        place = self._place(mask, 0)
        if place is not None and isinstance(prepared_mask, Tensor):
            # The reference keeps the mask alive, so that no other tensor gets its id.
            self._masks[id(prepared_mask)] = prepared_mask, place

    def _place(self, value: Any, first: int) -> int | None:
        places = range(first, len(self._given), 2)
        return next((place for place in places if value is not None and self._given[place] is value), None)

    def _answer(self, place: int) -> bool:
        if self._answers is None:
            # Masks are at even places and positions at odd ones; one transfer to the host reads all flags.
            answers = []
            for number, value in enumerate(self._given):
                if value is None:
                    answers.append(torch.zeros((), dtype=torch.bool, device="cpu"))
                elif number % 2:
                    answers.append(where_positions_begin(value).any())
                else:
                    answers.append((value == 0).any())
            device = next(value.device for value in self._given if value is not None)
            self._answers = torch.stack([answer.to(device) for answer in answers]).tolist()
        return self._answers[place]


class ForwardInputHook(Shared):
    """Hook that records the packing information of each forward."""

    def __init__(self, model: Any, state: ParallelState):
        self.state = state
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]

    def install(self) -> None:
        """Registers the hook."""
        self.state.hooks.add("forward input", self._enter, self._leave, always_exit=True)

    def _enter(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        self.state.call.numbers_tokens = POSITIONS in self.names and arguments.get(POSITIONS) is None
        self.state.call.packing_info = PackingInfo([arguments])

    def _leave(self, model: Any, args: tuple, output: Any) -> None:
        self.state.call.numbers_tokens, self.state.call.packing_info = False, None


def _active_forwards() -> list[PackingInfo]:
    states = filter(None, map(parallel_state, RUNTIME.models))
    return [state.call.packing_info for state in states if state.call.packing_info is not None]


def find_packed_sequence_indices(original: Callable, position_ids: Tensor) -> Tensor | None:
    """Returns the document index of each token from positions `[batch, tokens]`; `None` if no positions restart.

    Replaces the function of transformers, which waits for the device in every call.
    """
    if not torch.compiler.is_compiling():
        states = filter(None, map(parallel_state, RUNTIME.models))
        if any(state.call.numbers_tokens for state in states):
            return None
        answers = [known.begins_anew(position_ids) for known in _active_forwards()]
        if any(answers):
            return where_positions_begin(position_ids).cumsum(-1)
        if False in answers:
            return None
    return original(position_ids)


def where_positions_begin(positions: Tensor) -> Tensor:
    """Returns a mask `[batch, tokens]` of positions that do not follow the previous one; False at the first token."""
    return positions.diff(prepend=positions[:, :1] - 1) != 1


def preprocess_mask_arguments(
    original: Callable, config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Records in the active forwards which mask transformers makes from which."""
    result = original(config, inputs_embeds, attention_mask, *args, **kwargs)
    if not torch.compiler.is_compiling():
        for known in _active_forwards():
            known.note_mask(attention_mask, result[1])
    return result


def without_asking(stock: Callable) -> Callable:
    """Returns a mask function that uses the cached flags of the active forwards instead of reading the mask."""
    known = [] if torch.compiler.is_compiling() else _active_forwards()
    # transformers passes keywords only; functions that users have registered may take others.
    return partial(_mask, stock, known) if known else stock


def _mask(stock: Callable, known: list[PackingInfo], **kwargs: Any) -> Any:
    mask: Any = kwargs.get("attention_mask")
    keys = kwargs.get("kv_length")
    is_replicated = (
        mask is not None and kwargs.get("q_length") == keys and mask.shape == (kwargs.get("batch_size"), keys)
    )
    answers = [rows.hides_tokens(mask) for rows in known] if is_replicated else []
    hides = next((answer for answer in answers if answer is not None), None)
    # A mask that hides tokens must not be skipped, so the device is not asked; one that hides none is dropped.
    if hides:
        kwargs |= {name: False for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip") if name in kwargs}
    elif hides is False:
        kwargs["attention_mask"] = None
    return stock(**kwargs)
