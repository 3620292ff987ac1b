"""Which videos of a batch belong to which rows: by the rules of images, with placeholders of their own."""

from collections.abc import Mapping
from typing import Any

import torch

from .images import GRID, PIXELS, SECONDS, VIDEO_PIXELS, image_token, pixels_of, rows_with_images

# Arguments of videos, and those of images that have as many entries.
_AS_OF_IMAGES = {
    VIDEO_PIXELS: PIXELS,
    "video_grid_thw": GRID,
    "image_sizes_videos": "image_sizes",
    "video_merge_sizes": "image_merge_sizes",
    "second_per_grid_ts": SECONDS,
    "video_second_per_grid": SECONDS,
}


def video_token(config: Any) -> int | None:
    """Returns the token that stands for a part of a video, under whichever name a config has it."""
    found = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    return next((token for token in found if token is not None), None)


def is_of_videos(name: str) -> bool:
    """Tells whether an argument has an entry for each video, or parts of videos."""
    return name in _AS_OF_IMAGES


class _ConfigOfVideos:
    """Stands for a config where videos are what images are elsewhere."""

    def __init__(self, config: Any, token: int | None) -> None:
        self.image_token_id, self.vision_config = token, getattr(config, "vision_config", None)


def rows_with_videos(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the videos of some rows of a batch, in the arguments that they were given in, if there are any.

    Args:
        arguments (`Mapping`): `input_ids` `[rows, sequence]`; `pixel_values_videos` `[videos, ...]`, or
            `[patches, ...]` of all videos beside a grid `[videos, 3]`; and others with an entry for each video.
        rows (`slice`): of the batch.
        config (`PreTrainedConfig`): of the model. Where placeholders of videos are those of images, a batch has either.

    Raises:
        ConfigError: a video of which placeholders stand in two rows, or of another number of them.
    """
    names = {_AS_OF_IMAGES[name]: name for name, value in arguments.items() if is_of_videos(name) and value is not None}
    given = {image: arguments[name] for image, name in names.items()} | {"input_ids": arguments["input_ids"]}
    # Without any sizes frames would be taken for the images of a row.
    given.setdefault(SECONDS, torch.zeros(len(given.get(GRID, given[PIXELS]))))
    token = video_token(config)
    if pixels_of(arguments) is None and not bool((arguments["input_ids"] == token).any()):
        token = image_token(config)
    found = rows_with_images(given, rows, _ConfigOfVideos(config, token))
    return {names[name]: value for name, value in found.items() if name in names}
