"""Which images of a batch belong to which rows: those whose placeholders stand in them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError

PIXELS = "pixel_values"
GRID = "image_grid_thw"


def image_token(config: Any) -> int | None:
    """Returns the token that stands for a part of an image, of a config that has one."""
    values = config.to_dict()
    found = (values.get(name) for name in ("image_token_id", "image_token_index"))
    return next((token for token in found if token is not None), None)


def tokens_of_images(arguments: Mapping[str, Any], config: Any) -> list[int]:
    """Counts the placeholders of each image of a batch.

    Raises:
        ConfigError: as many placeholders as are there are no whole number for each image.
    """
    placeholders = int((arguments["input_ids"] == image_token(config)).sum())
    if GRID in arguments:
        merged = getattr(config.vision_config, "spatial_merge_size", 1) ** 2
        found = (arguments[GRID].prod(1) // merged).tolist()
    else:
        images = len(arguments[PIXELS])
        found = [placeholders // images] * images
    if sum(found) != placeholders:
        raise ConfigError(
            f"{placeholders} placeholders of images in input_ids for {len(found)} images, which need {sum(found)}."
        )
    return found


def rows_with_images(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the images of some rows of a batch, in the arguments that they were given in, if there are any.

    Args:
        arguments (`Mapping`): `input_ids` `[rows, sequence]`; `pixel_values` `[images, ...]`, or `[patches, width]`
            beside `image_grid_thw` `[images, 3]`; `image_*` with an entry for each image.
        rows (`slice`): of the batch.
        config (`PreTrainedConfig`): of the model.

    Raises:
        ConfigError: an image of which placeholders stand in two rows, or of another number of them.
    """
    ids = arguments["input_ids"]
    per_row = (ids == image_token(config)).sum(1).tolist()
    start, stop, _ = rows.indices(len(ids))
    ends = torch.tensor([0, *tokens_of_images(arguments, config)]).cumsum(0)
    first, last = (_place(ends, sum(per_row[:row])) for row in (start, stop))
    if first == last:
        return {}
    images = len(ends) - 1
    found = {
        name: value[first:last]
        for name, value in arguments.items()
        if name.startswith("image_") and isinstance(value, Tensor) and len(value) == images
    }
    pixels = arguments[PIXELS]
    if GRID in arguments:
        patches = torch.cat([ends.new_zeros(1), arguments[GRID].prod(1).cpu().cumsum(0)])
        return found | {PIXELS: pixels[int(patches[first]) : int(patches[last])]}
    return found | {PIXELS: pixels[first:last]}


def without_pixels(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves the images of any shape out of a call of stages that have no tower; their places and sizes stay."""
    return {name: value for name, value in arguments.items() if name != PIXELS}


def is_of_images(name: str) -> bool:
    """Tells whether an argument has an entry for each image, or parts of images."""
    return name == PIXELS or name.startswith("image_")


def _place(ends: Tensor, tokens: int) -> int:
    place = int(torch.searchsorted(ends, tokens))
    if int(ends[place]) != tokens:
        raise ConfigError("The placeholders of an image stand in two rows of input_ids: an image belongs to one row.")
    return place
