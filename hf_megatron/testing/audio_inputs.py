"""Audio input formats of models: features in two layouts, waveform samples or tokens, with clips of unequal lengths."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.modalities.audio import MASKS_OF_SOUNDS
from ..models.modalities.images import SOUNDS

# Names of the audio encoder's sub-config.
_PARTS = ("audio_config", "encoder_config", "acoustic_tokenizer_encoder_config", "acoustic_tokenizer_config")
# Config names of the number of features per frame.
_FEATURES = (
    *("input_size", "num_mel_bins", "n_mel_bins", "feature_size", "audio_embed_dim", "input_feat_per_channel"),
    "feature_projection_input_dim",
)
# Default number of features per frame.
_WIDTH = 128
# Config names of the number of waveform samples per token.
_SAMPLES = ("samples_per_token", "audio_samples_per_token")
# Frames of a clip: divisible by conv strides and frame groups. With fewer frames there might be no features.
_FRAMES = 32
# Tokens of a clip, if the samples per token are known.
_TOKENS = 6
# Samples of a clip, if the samples per token are not known.
_RAW = 4096
# Frames of a waveform clip, if the duration of a frame is known.
_FRAMES_OF_SAMPLES = 60
# A shorter clip lacks this fraction (one over the value) of the longest length.
_SHORTER = 4


def audio_inputs(
    config: Any,
    argument_names: set[str],
    total: int,
    generator: torch.Generator,
    masks: Sequence[str] = MASKS_OF_SOUNDS,
    frames: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yields audio arguments in the formats that a model may accept: unequal lengths, equal lengths, without a mask.

    Args:
        config (`PreTrainedConfig`): config of the model.
        argument_names (`set[str]`): argument names of the model's forward.
        total (`int`): number of clips.
        generator (`torch.Generator`): generator of the features.
        masks (`Sequence[str]`): names of arguments that are padding masks of clips.
        frames (`int`, *optional*): frames of each clip, if it has to match the length of a text.
    """
    name = next((name for name in SOUNDS if name in argument_names), None)
    if name is None:
        return
    audio = next((part for name in _PARTS if (part := getattr(config, name, None)) is not None), config)
    values = audio.to_dict()
    width = next((getattr(audio, key) for key in _FEATURES if isinstance(getattr(audio, key, None), int)), _WIDTH)
    # Some encoders only accept clips of one length, others a multiple of a window.
    longest = frames or 2 * (values.get("n_window") or values.get("max_source_positions") or _FRAMES // 2)
    samples = next((getattr(audio, key) for key in _SAMPLES if isinstance(getattr(audio, key, None), int)), None)
    if "downsampling_ratios" in values:
        samples = math.prod(values["downsampling_ratios"])
    lengths_of_clips = [longest]
    if name == "input_values":
        # Convolutions over samples start with wide kernels and strides.
        lengths_of_clips = [_TOKENS * samples] if samples else [longest, _RAW]
        if "frame_ms" in values:
            lengths_of_clips = [_FRAMES_OF_SAMPLES * round(values["sample_rate"] * values["frame_ms"] / 1000)]
    named = [mask for mask in masks if mask in argument_names]
    mask_options = [(True, named), (False, named), (False, [])] if named else [(False, [])]
    for longest, (is_uneven, are_given) in itertools.product(lengths_of_clips, mask_options):
        shorter = longest // _SHORTER if is_uneven else 0
        lengths = torch.tensor([longest - shorter * (clip % 2) for clip in range(total)])
        is_there = torch.arange(longest) < lengths[:, None]
        for shape in _shapes(name, width, longest, values):
            audio_clips = _draw(name, (total, *shape), values, generator)
            dim = 1 + shape.index(longest)
            seen = is_there.view(total, *(longest if dim == at else 1 for at in range(1, audio_clips.dim())))
            inputs = {name: audio_clips * seen} | dict.fromkeys(are_given, is_there)
            if "chunk_sample_lengths" in argument_names:
                inputs["chunk_sample_lengths"] = lengths * values["hop_length"]
            yield inputs


def _shapes(name: str, width: int, longest: int, values: dict[str, Any]) -> list[tuple[int, ...]]:
    if name == "input_values":
        return [(longest,), (1, longest)]
    if name == "audio_input_ids":
        return [(longest, values.get("n_mel_bins", width))]
    # Some encoders read features of the hidden size.
    embedded = [(longest, values["d_model"])] if "d_model" in values else []
    return [(width, longest), (longest, width), *embedded]


def _draw(name: str, shape: tuple[int, ...], values: dict[str, Any], generator: torch.Generator) -> Tensor:
    if name == "audio_input_ids":
        return torch.randint(values.get("mel_vocab_size", 2), shape, generator=generator)
    return torch.randn(*shape, generator=generator)
