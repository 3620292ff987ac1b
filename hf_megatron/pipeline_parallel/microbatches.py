"""A batch as microbatches: every tensor with a row per sample is cut along its rows, everything else is passed on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

ROW_DIM = 0
INPUTS = ("input_ids", "inputs_embeds")
# Positions in a sequence, of which there may be as many as rows.
_PASSED_ON = ("logits_to_keep",)


def batch_rows(arguments: Mapping[str, Any]) -> int:
    """Counts the samples of a batch; raises `ConfigError` where neither `input_ids` nor `inputs_embeds` is there."""
    for name in INPUTS:
        if isinstance(arguments.get(name), Tensor):
            return arguments[name].shape[ROW_DIM]
    raise ConfigError("A pipelined model needs input_ids (or inputs_embeds) to cut a batch into microbatches.")


def split(arguments: Mapping[str, Any], microbatches: int) -> list[dict[str, Any]]:
    """Cuts a batch into microbatches whose rows differ by one at most."""
    rows = batch_rows(arguments)
    edges = [rows * index // microbatches for index in range(microbatches + 1)]
    return [
        {name: _part(name, value, rows, start, stop) for name, value in arguments.items()}
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]


def _part(name: str, value: Any, rows: int, start: int, stop: int) -> Any:
    if name in _PASSED_ON:
        return value
    if name == "position_ids" and isinstance(value, Tensor) and value.dim() == 3:
        # Multimodal rotary positions: the first dim is time, height and width.
        return value[:, start:stop] if value.shape[1] == rows else value
    return _rows(value, rows, start, stop)


def _rows(value: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[ROW_DIM] == rows else value
    if isinstance(value, tuple | list):
        return type(value)(_rows(item, rows, start, stop) for item in value)
    if isinstance(value, dict):
        return {name: _rows(item, rows, start, stop) for name, item in value.items()}
    return value


def describe(arguments: Mapping[str, Any]) -> tuple:
    """Returns what decides the shapes that travel between stages: the same on every rank of a pipeline."""
    found: list[Any] = [torch.is_grad_enabled()]
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor) and name in INPUTS:
            found.append((name, tuple(value.shape), value.dtype))
        elif isinstance(value, str | int | float | bool | type(None)):
            found.append((name, value))
    return tuple(found)
