"""Batches of images and text for a tiny model: rows with one, two and no images, of several sizes if it takes them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..media import PLACES, image_token
from .image_forms import Canvas, image_forms, tiles_of_rows
from .twin import plain_tokens

# Images of the rows of a batch, over and over.
_IMAGES = (1, 2, 0)
_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Methods that make features of images, or of videos where nothing else has them.
_FEATURES = ("get_image_features", "get_video_features")
# What models raise for images of another form than theirs.
_UNFIT = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)


def make_image_batch(model: Any, *, batch_size: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Makes a batch with padding behind all rows but the longest.

    The placeholders of an image are as many as the model makes features of it.

    Args:
        model (`PreTrainedModel`): of a type with places for images in its text, or with an image for each row.

    Returns:
        `dict[str, Tensor]`: `input_ids`, `attention_mask`, `labels` and what the model asks for of the kinds of tokens,
        `[batch, sequence]`; images in the form that the model takes, see `media.rows_with_images`.
    """
    generator = torch.Generator().manual_seed(seed)
    asked = inspect.signature(model.forward).parameters
    tokens, placeholder = plain_tokens(model.config), image_token(model.config)
    has_places = placeholder is not None or PLACES in asked
    counts = [_IMAGES[row % len(_IMAGES)] if has_places else 1 for row in range(batch_size)]
    images, sizes = _images(model, counts, generator)

    def text(length: int) -> list[int]:
        return tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist()

    # Positions begin anew behind it, in models that have one.
    start = [token for token in [getattr(model.config, "vision_start_token_id", None)] if token is not None]
    rows, places, left = [], [], iter(sizes)
    for row, count in enumerate(counts):
        rows.append(text(4 + row))
        places.append([False] * len(rows[-1]))
        for _ in range(count):
            size = next(left)
            rows[-1] += start + (text(size) if placeholder is None else [placeholder] * size) + text(3)
            places[-1] += [False] * len(start) + [True] * size + [False] * 3
    length, pad = max(map(len, rows)), getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    input_ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    is_image = torch.tensor([row + [False] * (length - len(row)) for row in places])
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill((attention_mask == 0) | is_image, -100),
    }
    batch |= {name: is_image.long() for name in (*_KINDS_OF_TOKENS, PLACES) if name in asked}
    if "cross_attention_mask" in asked:
        batch["cross_attention_mask"] = _seen_tiles(is_image, images["aspect_ratio_mask"])
    return batch | images


def _images(model: Any, counts: Sequence[int], generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Returns the images of rows in the first form that the model takes, and the features it makes of each of them."""
    canvas, asked = Canvas(model.config, generator), {*inspect.signature(model.forward).parameters}
    if "aspect_ratio_ids" in asked:
        # Layers read images beside the tokens, of which one stands for each.
        return tiles_of_rows(canvas, counts), [1] * sum(counts)
    named = [(part, name) for part in (model, model.base_model) for name in _FEATURES if name in dir(type(part))]
    if not named:
        # As many as the config says, or none in the text.
        form = next(image_forms(canvas, asked, counts))
        return form(), [getattr(model.config, "latent_query_num", 0)] * sum(counts)
    features = getattr(*named[0])
    asked |= {*inspect.signature(features).parameters}
    problems = []
    for form in image_forms(canvas, asked, counts):
        images = form()
        try:
            return images, _features(features, images, sum(counts))
        except _UNFIT as error:
            problems.append(str(error))
    raise RuntimeError("; ".join(problems))


def _seen_tiles(is_image: Tensor, tiles: Tensor) -> Tensor:
    """Returns which tiles tokens see, `[rows, sequence, images, tiles]`: those of the images that begin before them."""
    begun = is_image.cumsum(1)[..., None] > torch.arange(tiles.shape[1])
    return begun[..., None].long() * tiles[:, None]


def _features(features: Callable[..., Any], images: Mapping[str, Tensor], total: int) -> list[int]:
    """Counts what the model makes of each image."""
    with torch.no_grad():
        output = features(**images)
        found = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    parts = [found] if isinstance(found, Tensor) else found
    lengths = [part.flatten(0, -2).shape[0] for part in parts]
    return lengths if len(lengths) == total else [sum(lengths) // total] * total
