"""Which sounds of a batch belong to which rows: by the rules of images, with placeholders of their own."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .images import ENTRIES, PIXELS, SOUNDS, rows_with_images

# Which parts of a clip are no padding, in the order of the above.
MASKS_OF_SOUNDS = (
    *("input_features_mask", "feature_attention_mask", "input_values_mask", "audio_input_ids_mask"),
    *("audio_attention_mask", "padding_mask"),
)
# An entry for each clip.
LENGTHS_OF_SOUNDS = ("audio_feature_lengths", "audio_embed_sizes", "chunk_sample_lengths")
# Frames of a clip that is added to the tokens of its row, for each of these.
FRAMES_OF_TOKEN = "audio_length_per_tok"
_PREFIX = "image_"


def audio_token(config: Any) -> int | None:
    """Returns the token that stands for a part of a sound, under whichever name a config has it."""
    places, names = (config, getattr(config, "audio_config", None)), ("audio_token_id", "audio_token_index")
    found = (getattr(place, name, None) for place in places for name in names)
    return next((token for token in found if token is not None), None)


def has_clip_per_row(config: Any) -> bool:
    """Tells whether a model reads a clip for each row: in an encoder, or added to the row's tokens."""
    is_added = getattr(config, FRAMES_OF_TOKEN, None) is not None
    return audio_token(config) is None and (is_added or getattr(config, "is_encoder_decoder", False))


def is_audio(name: str) -> bool:
    """Tells whether an argument has an entry for each clip."""
    return name in (*SOUNDS, *MASKS_OF_SOUNDS, *LENGTHS_OF_SOUNDS)


def audio_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the sounds of a call `[clips, ...]`."""
    return next((arguments[name] for name in SOUNDS if isinstance(arguments.get(name), Tensor)), None)


class _ConfigOfSounds:
    """Stands for a config where sounds are what images are elsewhere."""

    def __init__(self, config: Any) -> None:
        self.image_token_id = audio_token(config)


def samples_with_audio(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the sounds of some rows of a batch, in the arguments that they were given in, if there are any.

    Args:
        arguments (`Mapping`): `input_ids` `[rows, sequence]`; one of `SOUNDS` `[clips, ...]`, and others with an entry
            for each clip.
        rows (`slice`): of the batch.
        config (`PreTrainedConfig`): of the model.

    Raises:
        ConfigError: a clip of which placeholders stand in two rows, or of another number of them.
    """
    given = {name: value for name, value in arguments.items() if is_audio(name) and value is not None}
    audio_clips = audio_of(arguments)
    assert audio_clips is not None
    lengths = [given[name] for name in LENGTHS_OF_SOUNDS if name in given]
    lengths += [given[name].flatten(1).sum(1) for name in MASKS_OF_SOUNDS if name in given]
    # Longer ones have more placeholders where it is not seen where one ends and the next begins.
    others = {PIXELS: audio_clips, "input_ids": arguments["input_ids"]} | ({ENTRIES: lengths[0]} if lengths else {})
    found = rows_with_images(others | {_PREFIX + name: given[name] for name in given}, rows, _ConfigOfSounds(config))
    return {name: found[_PREFIX + name] for name in given if _PREFIX + name in found}
