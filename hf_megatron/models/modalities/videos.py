"""Assignment of videos to the samples of a batch, by the rules for images with placeholders of their own."""

from collections.abc import Mapping
from typing import Any

import torch

from .images import GRID, PIXELS, SECONDS, VIDEO_PIXELS, get_pixels, image_token, rows_with_images

# Video argument -> the image argument with the corresponding entries.
_AS_OF_IMAGES = {
    VIDEO_PIXELS: PIXELS,
    "video_grid_thw": GRID,
    "image_sizes_videos": "image_sizes",
    "video_merge_sizes": "image_merge_sizes",
    "second_per_grid_ts": SECONDS,
    "video_second_per_grid": SECONDS,
}


def video_token(config: Any) -> int | None:
    """Returns the placeholder token id of videos, under any of its config names; `None` if there is none."""
    token_ids = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    return next((token for token in token_ids if token is not None), None)


def is_video_argument(name: str) -> bool:
    """Returns whether an argument has one entry per video or patch of videos."""
    return name in _AS_OF_IMAGES


class _ConfigOfVideos:
    """Config proxy for the image functions, with the video placeholder as image token."""

    def __init__(self, config: Any, token: int | None) -> None:
        self.image_token_id, self.vision_config = token, getattr(config, "vision_config", None)


def rows_with_videos(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the video arguments of a range of samples, empty if these samples have no videos.

    Args:
        arguments (`Mapping`): `input_ids` `[batch, sequence]`; `pixel_values_videos` `[videos, ...]`, or
            `[patches, ...]` of all videos with a grid `[videos, 3]`; and other arguments with one entry per video.
        rows (`slice`): range of samples of the batch.
        config (`PreTrainedConfig`): config of the model. If videos and images share a placeholder, a batch has either.

    Raises:
        ConfigError: the placeholders of a video span two samples, or their number does not match the video.
    """
    names = {
        _AS_OF_IMAGES[name]: name for name, value in arguments.items() if is_video_argument(name) and value is not None
    }
    image_arguments = {image: arguments[name] for image, name in names.items()} | {"input_ids": arguments["input_ids"]}
    # `[videos, frames, ...]` without any sizes would be taken for `[batch, images, ...]`: pass dummy sizes.
    image_arguments.setdefault(SECONDS, torch.zeros(len(image_arguments.get(GRID, image_arguments[PIXELS]))))
    token = video_token(config)
    if get_pixels(arguments) is None and not bool((arguments["input_ids"] == token).any()):
        token = image_token(config)
    sliced = rows_with_images(image_arguments, rows, _ConfigOfVideos(config, token))
    return {names[name]: value for name, value in sliced.items() if name in names}
