"""Splits a batch into microbatches: tensors with a batch dim are split along it, others are passed on unchanged.

A tensor whose size matches the batch size may still mean something else. Tensors that cannot be classified are rejected
before anything runs.
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
# Decoder inputs of an encoder-decoder; the encoder's may be missing if its output is passed.
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
# Arguments that determine the shapes of activations; decoder inputs may be created from labels.
_SHAPED = (*INPUTS, *DECODER_INPUTS, *SOUNDS, "labels")
# Indexed by position, layer or head, whose number may equal the batch size by chance.
_PASSED_ON = ("logits_to_keep", "cache_position", "head_mask")
_ONE_PER_ROW = ("labels", "next_sentence_label", "sentence_order_label", "start_positions", "end_positions")
# Ends of documents in the flattened batch.
_OF_THE_WHOLE_BATCH = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


def batch_size(arguments: Mapping[str, Any]) -> int:
    """Returns the batch size of a call; raises `ConfigError` if it has no inputs."""
    return _inputs(arguments).shape[ROW_DIM]


def _inputs(arguments: Mapping[str, Any]) -> Tensor:
    for name in (*INPUTS, *DECODER_INPUTS, *SOUNDS):
        if isinstance(arguments.get(name), Tensor):
            return arguments[name]
    if (encoded := _encoded(arguments)) is not None:
        return encoded
    raise ConfigError("A pipelined model needs input_ids (or inputs_embeds) to split a batch into microbatches.")


def _encoded(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the encoder output `[batch, sequence, hidden]` that was passed to a call, or `None`."""
    outputs = arguments.get("encoder_outputs")
    values = outputs.values() if isinstance(outputs, Mapping) else outputs or ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def split(
    arguments: Mapping[str, Any],
    microbatches: int,
    config: Any = None,
    *,
    modalities: AbstractSet[str] = frozenset({"videos", "audio"}),
) -> list[dict[str, Any]]:
    """Splits a batch into microbatches whose sizes differ by one sample at most.

    Images, videos and audio are assigned to the samples that contain their placeholder tokens.

    Args:
        modalities (`Set[str]`): supported modalities in addition to images.

    Raises:
        ConfigError: if a tensor has neither a batch dim nor size 1 along it.
        UnsupportedError: for videos or audio not in `modalities`, or in a form that `multimodal_samples` does not
            support.
    """
    rows = batch_size(arguments)
    for name, value in arguments.items():
        is_of_row = name in SOUNDS and has_clip_per_row(config)
        is_of_kinds = {"videos": is_video_argument(name), "audio": is_audio(name) and audio_token(config) is not None}
        is_known = config is not None and any(is_of_kinds[medium] for medium in is_of_kinds.keys() & modalities)
        if isinstance(value, Tensor) and any(part in name for part in NOT_OF_ROWS) and not (is_known or is_of_row):
            raise UnsupportedError(
                f"{name}: a pipeline cannot split it into microbatches for this model. It supports images, and videos "
                "and audio of verified model types. Leave it out, or load the model with pp_size=1."
            )
    if microbatches == 1:
        return [dict(arguments)]
    # Boundaries along the batch dim: microbatch i gets samples [edges[i], edges[i + 1]).
    edges = [rows * index // microbatches for index in range(microbatches + 1)]
    with_places = modality_names(arguments, config) if config is not None else set()
    per_row = {name: value for name, value in arguments.items() if name not in with_places}
    batches = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        part = slice(start, stop)
        of_rows = {name: _part(name, value, rows, part) for name, value in per_row.items()}
        batches.append(of_rows | (multimodal_samples(arguments, part, config) if with_places else {}))
    return batches


def _part(name: str, value: Any, rows: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        samples = _rows(name, value, rows, part)
        # Some models fill padding of their inputs in place (FSMT). Views share a version counter, so an edit of one
        # microbatch would invalidate what autograd saved of another.
        return samples if samples.is_floating_point() else samples.clone()
    if isinstance(value, tuple | list):
        return type(value)(_part(name, item, rows, part) for item in value)
    if isinstance(value, ModelOutput):
        return type(value)(**{key: _part(name, item, rows, part) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: _part(name, item, rows, part) for key, item in value.items()}
    return value


def _rows(name: str, tensor: Tensor, rows: int, part: slice) -> Tensor:
    # Multimodal rotary positions are [3, batch, tokens] (time, height, width); positions may also be [tokens].
    row_dim = tensor.dim() - 2 if name == "position_ids" else ROW_DIM
    if tensor.dim() == 0 or row_dim < 0 or name in _PASSED_ON:
        return tensor
    has_rows = tensor.shape[row_dim] == rows and (tensor.dim() > 1 or name in _ONE_PER_ROW)
    if name not in _OF_THE_WHOLE_BATCH and has_rows:
        return tensor[(slice(None),) * row_dim + (part,)]
    if tensor.shape[row_dim] == 1 and tensor.dim() > 1:
        return tensor
    raise ConfigError(
        f"{name} of shape {tuple(tensor.shape)} cannot be split into microbatches: it is not known which of its "
        f"entries belong to which of the {rows} samples. Leave it out, give it a batch dimension, or set "
        "num_microbatches=1."
    )


def compute_microbatch_spans(
    microbatches: Sequence[Mapping[str, Any]], weights: Sequence[float]
) -> list[MicrobatchSpan]:
    """Returns the span of samples and tokens that each microbatch holds; microbatches of weight 0 are padding."""
    parts, passed = [], 0
    for arguments, weight in zip(microbatches, weights, strict=True):
        inputs = _inputs(arguments)
        rows, tokens = inputs.shape[:2] if inputs.dim() > 1 else (len(inputs), 1)
        parts.append(MicrobatchSpan(passed, rows, tokens, weight == 0.0))
        passed += rows * tokens
    return parts


def describe(arguments: Mapping[str, Any]) -> tuple:
    """Returns a key that determines the shapes sent between stages; identical on every rank of a pipeline."""
    key: list[Any] = [torch.is_grad_enabled()]
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor) and name in _SHAPED:
            key.append((name, tuple(value.shape), value.dtype))
        elif isinstance(value, str | int | float | bool | type(None)):
            key.append((name, value))
    encoded = _encoded(arguments)
    return tuple(key) if encoded is None else (*key, tuple(encoded.shape))
