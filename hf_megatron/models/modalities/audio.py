"""Assignment of audio clips to the samples of a batch, by the rules for images with placeholders of their own."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .images import ENTRIES, PIXELS, SOUNDS, rows_with_images

# Padding masks of clips.
MASKS_OF_SOUNDS = (
    *("input_features_mask", "feature_attention_mask", "input_values_mask", "audio_input_ids_mask"),
    *("audio_attention_mask", "padding_mask"),
)
# Length of each clip.
LENGTHS_OF_SOUNDS = ("audio_feature_lengths", "audio_embed_sizes", "chunk_sample_lengths")
# Config attribute with the number of audio frames per token, for models that add audio features to the tokens.
FRAMES_OF_TOKEN = "audio_length_per_tok"
_PREFIX = "image_"


def audio_token(config: Any) -> int | None:
    """Returns the placeholder token id of audio, under any of its config names; `None` if there is none."""
    places, names = (config, getattr(config, "audio_config", None)), ("audio_token_id", "audio_token_index")
    token_ids = (getattr(place, name, None) for place in places for name in names)
    return next((token for token in token_ids if token is not None), None)


def has_clip_per_row(config: Any) -> bool:
    """Returns whether a model reads one clip per sample: in an encoder, or added to the sample's tokens."""
    is_added = getattr(config, FRAMES_OF_TOKEN, None) is not None
    return audio_token(config) is None and (is_added or getattr(config, "is_encoder_decoder", False))


def is_audio(name: str) -> bool:
    """Returns whether an argument has one entry per clip."""
    return name in (*SOUNDS, *MASKS_OF_SOUNDS, *LENGTHS_OF_SOUNDS)


def get_audio(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the audio clips of a call `[clips, ...]`, or `None`."""
    return next((arguments[name] for name in SOUNDS if isinstance(arguments.get(name), Tensor)), None)


class _ConfigOfSounds:
    """Config proxy for the image functions, with the audio placeholder as image token."""

    def __init__(self, config: Any) -> None:
        self.image_token_id = audio_token(config)


def samples_with_audio(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the audio arguments of a range of samples, empty if these samples have no clips.

    Args:
        arguments (`Mapping`): `input_ids` `[batch, sequence]`; one of `SOUNDS` `[clips, ...]`, and other arguments with
            one entry per clip.
        rows (`slice`): range of samples of the batch.
        config (`PreTrainedConfig`): config of the model.

    Raises:
        ConfigError: the placeholders of a clip span two samples, or their number does not match the clip.
    """
    audio_arguments = {name: value for name, value in arguments.items() if is_audio(name) and value is not None}
    audio_clips = get_audio(arguments)
    assert audio_clips is not None
    lengths = [audio_arguments[name] for name in LENGTHS_OF_SOUNDS if name in audio_arguments]
    lengths += [audio_arguments[name].flatten(1).sum(1) for name in MASKS_OF_SOUNDS if name in audio_arguments]
    # Adjacent clips have no visible border: their placeholders are then divided in proportion to the lengths.
    others = {PIXELS: audio_clips, "input_ids": arguments["input_ids"]} | ({ENTRIES: lengths[0]} if lengths else {})
    sliced = rows_with_images(
        others | {_PREFIX + name: audio_arguments[name] for name in audio_arguments}, rows, _ConfigOfSounds(config)
    )
    return {name: sliced[_PREFIX + name] for name in audio_arguments if _PREFIX + name in sliced}
