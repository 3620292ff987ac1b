"""Batches of images and text for a tiny model: rows with one, two and no images, of several sizes if it takes them."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ..media import GRID, PIXELS, image_token
from .twin import plain_tokens

# Images of the rows of a batch, over and over.
_IMAGES = (1, 2, 0)


def make_image_batch(model: Any, *, batch_size: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Makes a batch with padding behind all rows but the longest.

    The placeholders of an image are as many as the model makes features of it.

    Args:
        model (`PreTrainedModel`): with `get_image_features` and a placeholder's token in its config.

    Returns:
        `dict[str, Tensor]`: `input_ids`, `attention_mask`, `labels` and what the model asks for of the kinds of tokens,
        `[batch, sequence]`; images as `pixel_values` `[images, channels, height, width]`, or `[patches, width]` and
        `image_grid_thw` `[images, 3]`.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [_IMAGES[row % len(_IMAGES)] for row in range(batch_size)]
    images = _images(model, sum(counts), generator)
    sizes = iter(_features(model, images))
    tokens, placeholder = plain_tokens(model.config), image_token(model.config)
    assert placeholder is not None

    def text(length: int) -> list[int]:
        return tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist()

    rows = []
    for row, count in enumerate(counts):
        rows.append(text(4 + row))
        for _ in range(count):
            rows[-1] += [placeholder] * next(sizes) + text(3)
    length, pad = max(map(len, rows)), getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    input_ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    is_image = input_ids == placeholder
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill((attention_mask == 0) | is_image, -100),
    }
    asked = inspect.signature(model.forward).parameters
    batch |= {name: is_image.long() for name in ("token_type_ids", "mm_token_type_ids") if name in asked}
    return batch | images


def _images(model: Any, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    vision = model.config.vision_config
    values = vision.to_dict()
    channels = next((values[name] for name in ("num_channels", "in_channels", "in_chans") if values.get(name)), 3)
    if GRID in inspect.signature(model.forward).parameters:
        merge = values.get("spatial_merge_size") or 1
        grid = torch.tensor([[1, merge * (1 + image % 2), merge * 2] for image in range(count)])
        width = channels * (values.get("temporal_patch_size") or 1) * values["patch_size"] ** 2
        return {PIXELS: torch.randn(int(grid.prod(1).sum()), width, generator=generator), GRID: grid}
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    images = {PIXELS: torch.randn(count, channels, height, width, generator=generator)}
    if "image_sizes" in inspect.signature(model.get_image_features).parameters:
        images["image_sizes"] = torch.tensor([[height, width]] * count)
    return images


def _features(model: Any, images: dict[str, Tensor]) -> list[int]:
    """Counts what the model makes of each image."""
    with torch.no_grad():
        found = model.get_image_features(**images).pooler_output
    count = len(images.get(GRID, images[PIXELS]))
    if isinstance(found, Tensor):
        return [found.flatten(0, -2).shape[0] // count] * count
    return [part.flatten(0, -2).shape[0] for part in found]
