"""Images, videos and audio: which models read them, and which entries belong to a range of samples."""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .audio import audio_token, get_audio, is_audio, samples_with_audio
from .images import VIDEO_PIXELS, get_pixels, has_places, image_token, is_image_argument, rows_with_images
from .videos import is_video_argument, rows_with_videos

_TOWERS = ("vision_config", "audio_config")


# Modality -> its singular in error messages.
_ONE = {"images": "image", "videos": "video", "audio": "audio clip"}


def reads_modalities(model: Any) -> bool:
    """Returns whether a model generates text from images or audio, through placeholder tokens or otherwise."""
    has_encoder = model.can_generate() and not model.config.to_dict().keys().isdisjoint(_TOWERS)
    return has_encoder or any(find(model.config) is not None for find in (image_token, audio_token))


def passed_modalities(arguments: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """Returns which of `"images"`, `"videos"` and `"audio"` a call passes, with placeholders in its text."""
    has = {
        "images": get_pixels(arguments) is not None and has_places(arguments, config),
        "videos": arguments.get(VIDEO_PIXELS) is not None,
        "audio": get_audio(arguments) is not None and audio_token(config) is not None,
    }
    return tuple(name for name, is_given in has.items() if is_given)


def modality_names(arguments: Mapping[str, Any], config: Any) -> set[str]:
    """Returns the names of a call's arguments with entries for the modalities in `passed_modalities`."""
    belongs = {"images": is_image_argument, "videos": is_video_argument, "audio": is_audio}
    return {name for kind in passed_modalities(arguments, config) for name in arguments if belongs[kind](name)}


def multimodal_samples(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the image, video and audio arguments of a range of samples.

    Args:
        arguments (`Mapping`): as for `rows_with_images`, `rows_with_videos` and `samples_with_audio`.
        rows (`slice`): range of samples of the batch.
        config (`PreTrainedConfig`): config of the model.

    Raises:
        ConfigError: the placeholders of an image, video or clip span two samples, or their number does not match.
    """
    cut = {"images": rows_with_images, "videos": rows_with_videos, "audio": samples_with_audio}
    sliced: dict[str, Any] = {}
    for kind in passed_modalities(arguments, config):
        try:
            sliced |= cut[kind](arguments, rows, config)
        except ConfigError as error:
            # All modalities are indexed by the image functions, whose messages say "image".
            one = _ONE[kind]
            raise ConfigError(str(error).replace("images", f"{one}s").replace("image", one)) from error
    return sliced
