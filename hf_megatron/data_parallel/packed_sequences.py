"""What the host has to know of the rows of a call: whether masks leave tokens out, and where positions begin anew.

transformers asks the device in every mask it makes, of a pipeline in each microbatch, and the host waits for what lies
before. A call is asked here once: with its first mask, for all of its microbatches. What transformers makes of the
answers stays as it is. Positions that a model counts itself begin once a row; nobody asks for them.
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
    """Masks `[rows, tokens]` and positions `[rows, tokens]` of a call's microbatches, and one answer for each.

    Args:
        microbatches: the arguments of each.

    Attributes:
        finds_documents: whether somebody has asked for documents in the positions of the call.
    """

    def __init__(self, microbatches: Sequence[Mapping[str, Any]]):
        inputs = [microbatch.get(name) for microbatch in microbatches for name in (_MASK, POSITIONS)]
        self._given = [value if isinstance(value, Tensor) and value.dim() == 2 else None for value in inputs]
        self._masks: dict[int, tuple[Tensor, int]] = {}
        self._answers: list[bool] | None = None
        self.finds_documents = False

    def hides_tokens(self, mask: Tensor) -> bool | None:
        """Tells whether a mask that transformers made of one of the call's leaves tokens out; `None` of another one."""
        _, place = self._masks.get(id(mask), (None, None))
        return None if place is None else self._answer(place)

    def begins_anew(self, positions: Tensor) -> bool | None:
        """Tells whether positions of the call begin anew in a row; `None` of others."""
        place = self._place(positions, 1)
        self.finds_documents |= place is not None
        return None if place is None else self._answer(place)

    def note_mask(self, mask: Any, prepared_mask: Any) -> None:
        """Notes what transformers made of a mask that it was given."""
        place = self._place(mask, 0)
        if place is not None and isinstance(prepared_mask, Tensor):
            # It is kept: nothing else may get its number.
            self._masks[id(prepared_mask)] = prepared_mask, place

    def _place(self, value: Any, first: int) -> int | None:
        places = range(first, len(self._given), 2)
        return next((place for place in places if value is not None and self._given[place] is value), None)

    def _answer(self, place: int) -> bool:
        if self._answers is None:
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
    """Notes for each call of a model what it was given."""

    def __init__(self, model: Any, state: ParallelState):
        self.state = state
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]

    def install(self) -> None:
        """Adds the functions to the model's table of hooks."""
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
    """Tells documents in rows apart by positions `[rows, tokens]`; `None` where none begin anew."""
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
    """Tells where positions `[rows, tokens]` do not follow the ones before; they do so at the first token."""
    return positions.diff(prepend=positions[:, :1] - 1) != 1


def preprocess_mask_arguments(
    original: Callable, config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Has the call under way remember which mask becomes which."""
    result = original(config, inputs_embeds, attention_mask, *args, **kwargs)
    if not torch.compiler.is_compiling():
        for known in _active_forwards():
            known.note_mask(attention_mask, result[1])
    return result


def without_asking(stock: Callable) -> Callable:
    """Returns a function of masks that knows what masks of the call under way leave out."""
    known = [] if torch.compiler.is_compiling() else _active_forwards()
    # transformers calls them by keywords alone; what users have registered may have others.
    return partial(_mask, stock, known) if known else stock


def _mask(stock: Callable, known: list[PackingInfo], **kwargs: Any) -> Any:
    mask: Any = kwargs.get("attention_mask")
    keys = kwargs.get("kv_length")
    is_full_mask = (
        mask is not None and kwargs.get("q_length") == keys and mask.shape == (kwargs.get("batch_size"), keys)
    )
    answers = [rows.hides_tokens(mask) for rows in known] if is_full_mask else []
    hides = next((answer for answer in answers if answer is not None), None)
    if hides:
        kwargs |= {name: False for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip") if name in kwargs}
    elif hides is False:
        kwargs["attention_mask"] = None
    return stock(**kwargs)
