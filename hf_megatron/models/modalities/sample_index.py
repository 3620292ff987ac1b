"""Images, videos and sounds: which models write text about them, and which of them belong to some rows of a batch."""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .audio import audio_of, audio_token, is_audio, samples_with_audio
from .images import VIDEO_PIXELS, has_places, image_token, is_of_images, pixels_of, rows_with_images
from .videos import is_of_videos, rows_with_videos

_TOWERS = ("vision_config", "audio_config")


# Modality -> one of it, as messages name it.
_ONE = {"images": "image", "videos": "video", "audio": "audio clip"}


def reads_modalities(model: Any) -> bool:
    """Tells whether a model writes text about images or sounds, in places of a token or elsewhere."""
    has_encoder = model.can_generate() and not model.config.to_dict().keys().isdisjoint(_TOWERS)
    return has_encoder or any(find(model.config) is not None for find in (image_token, audio_token))


def passed_modalities(arguments: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    """Lists what of `"images"`, `"videos"` and `"audio"` stands in places of the text of a call."""
    has = {
        "images": pixels_of(arguments) is not None and has_places(arguments, config),
        "videos": arguments.get(VIDEO_PIXELS) is not None,
        "audio": audio_of(arguments) is not None and audio_token(config) is not None,
    }
    return tuple(name for name, is_given in has.items() if is_given)


def modality_names(arguments: Mapping[str, Any], config: Any) -> set[str]:
    """Lists the arguments of a call that have entries for what `passed_modalities` names."""
    belongs = {"images": is_of_images, "videos": is_of_videos, "audio": is_audio}
    return {name for kind in passed_modalities(arguments, config) for name in arguments if belongs[kind](name)}


def multimodal_samples(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the images, videos and sounds of some rows of a batch, in the arguments that they were given in.

    Args:
        arguments (`Mapping`): as `rows_with_images`, `rows_with_videos` and `samples_with_audio` take them.
        rows (`slice`): of the batch.
        config (`PreTrainedConfig`): of the model.

    Raises:
        ConfigError: an image, video or clip of which placeholders stand in two rows, or of another number of them.
    """
    cut = {"images": rows_with_images, "videos": rows_with_videos, "audio": samples_with_audio}
    found: dict[str, Any] = {}
    for kind in passed_modalities(arguments, config):
        try:
            found |= cut[kind](arguments, rows, config)
        except ConfigError as error:
            # All of them are cut by the rules of images.
            one = _ONE[kind]
            raise ConfigError(str(error).replace("images", f"{one}s").replace("image", one)) from error
    return found
