"""A batch as microbatches: every tensor with a row per sample is cut along its rows; what has none is passed on.

A batch of which it cannot be told is refused before anything runs: a tensor may have as many entries as there are rows
and mean something else by them.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..errors import ConfigError, UnsupportedError
from ..models.modalities.audio import audio_token, has_clip_per_row, is_audio
from ..models.modalities.images import NOT_OF_ROWS, SOUNDS
from ..models.modalities.sample_index import modality_names, multimodal_samples
from ..models.modalities.videos import is_video_argument
from ..parallel_state import MicrobatchSpan

ROW_DIM = 0
INPUTS = ("input_ids", "inputs_embeds")
# Of the decoder behind an encoder; the encoder's may be left out where its output is given.
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
# A decoder's inputs may be made of its labels.
_SHAPED = (*INPUTS, *DECODER_INPUTS, *SOUNDS, "labels")
# Positions in a sequence, layers and heads, of which there may be as many as rows.
_PASSED_ON = ("logits_to_keep", "cache_position", "head_mask")
_ONE_PER_ROW = ("labels", "next_sentence_label", "sentence_order_label", "start_positions", "end_positions")
# Where documents end in all rows together.
_OF_THE_WHOLE_BATCH = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


def batch_size(arguments: Mapping[str, Any]) -> int:
    """Counts the samples of a batch; raises `ConfigError` where nothing that says so is there."""
    return _inputs(arguments).shape[ROW_DIM]


def _inputs(arguments: Mapping[str, Any]) -> Tensor:
    for name in (*INPUTS, *DECODER_INPUTS, *SOUNDS):
        if isinstance(arguments.get(name), Tensor):
            return arguments[name]
    if (encoded := _encoded(arguments)) is not None:
        return encoded
    raise ConfigError("A pipelined model needs input_ids (or inputs_embeds) to cut a batch into microbatches.")


def _encoded(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns what an encoder made, `[batch, sequence, hidden]`, where a call is given it."""
    given = arguments.get("encoder_outputs")
    values = given.values() if isinstance(given, Mapping) else given or ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def split(
    arguments: Mapping[str, Any],
    microbatches: int,
    config: Any = None,
    *,
    modalities: AbstractSet[str] = frozenset({"videos", "audio"}),
) -> list[dict[str, Any]]:
    """Cuts a batch into microbatches whose rows differ by one at most; images, videos and sounds go with their rows.

    Args:
        media (`Set[str]`): what a pipeline takes beside images.

    Raises `ConfigError` for a tensor that has neither a row per sample nor one for all, `UnsupportedError` for videos
    and sounds that `modalities` does not name, or in other forms than those of `multimodal_samples`.
    """
    rows = batch_size(arguments)
    for name, value in arguments.items():
        is_of_row = name in SOUNDS and has_clip_per_row(config)
        is_of_kinds = {"videos": is_video_argument(name), "audio": is_audio(name) and audio_token(config) is not None}
        is_known = config is not None and any(is_of_kinds[medium] for medium in is_of_kinds.keys() & modalities)
        if isinstance(value, Tensor) and any(part in name for part in NOT_OF_ROWS) and not (is_known or is_of_row):
            raise UnsupportedError(
                f"{name}: a pipeline gives stages images, and videos and sounds of types that were compared so, with "
                "the rows of their placeholders. Leave it out, or load the model with pp_size=1."
            )
    if microbatches == 1:
        return [dict(arguments)]
    edges = [rows * index // microbatches for index in range(microbatches + 1)]
    with_places = modality_names(arguments, config) if config is not None else set()
    per_row = {name: value for name, value in arguments.items() if name not in with_places}
    found = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        part = slice(start, stop)
        of_rows = {name: _part(name, value, rows, part) for name, value in per_row.items()}
        found.append(of_rows | (multimodal_samples(arguments, part, config) if with_places else {}))
    return found


def _part(name: str, value: Any, rows: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        return _rows(name, value, rows, part)
    if isinstance(value, tuple | list):
        return type(value)(_part(name, item, rows, part) for item in value)
    if isinstance(value, ModelOutput):
        return type(value)(**{key: _part(name, item, rows, part) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: _part(name, item, rows, part) for key, item in value.items()}
    return value


def _rows(name: str, tensor: Tensor, rows: int, part: slice) -> Tensor:
    # Multimodal rotary positions have time, height and width in front of the rows; positions for all rows have no rows.
    row_dim = tensor.dim() - 2 if name == "position_ids" else ROW_DIM
    if tensor.dim() == 0 or row_dim < 0 or name in _PASSED_ON:
        return tensor
    has_rows = tensor.shape[row_dim] == rows and (tensor.dim() > 1 or name in _ONE_PER_ROW)
    if name not in _OF_THE_WHOLE_BATCH and has_rows:
        return tensor[(slice(None),) * row_dim + (part,)]
    if tensor.shape[row_dim] == 1 and tensor.dim() > 1:
        return tensor
    raise ConfigError(
        f"{name} of shape {tuple(tensor.shape)} beside a batch of {rows} rows: it cannot be told which part of it "
        "belongs to which microbatch of a pipeline. Leave it out, give it a row per sample, or set num_microbatches=1."
    )


def compute_microbatch_spans(
    microbatches: Sequence[Mapping[str, Any]], weights: Sequence[float]
) -> list[MicrobatchSpan]:
    """Says which tokens of their batch microbatches hold; those of no weight repeat another one."""
    parts, passed = [], 0
    for arguments, weight in zip(microbatches, weights, strict=True):
        inputs = _inputs(arguments)
        rows, tokens = inputs.shape[:2] if inputs.dim() > 1 else (len(inputs), 1)
        parts.append(MicrobatchSpan(passed, rows, tokens, weight == 0.0))
        passed += rows * tokens
    return parts


def describe(arguments: Mapping[str, Any]) -> tuple:
    """Returns what decides the shapes that travel between stages: the same on every rank of a pipeline."""
    found: list[Any] = [torch.is_grad_enabled()]
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor) and name in _SHAPED:
            found.append((name, tuple(value.shape), value.dtype))
        elif isinstance(value, str | int | float | bool | type(None)):
            found.append((name, value))
    encoded = _encoded(arguments)
    return tuple(found) if encoded is None else (*found, tuple(encoded.shape))
