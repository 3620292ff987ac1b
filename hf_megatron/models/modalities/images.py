"""Assignment of images to the samples of a batch: an image belongs to the sample with its placeholder tokens."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError

PIXELS = "pixel_values"
# Mask of image positions, for models without a placeholder token.
PLACES = "image_embeds_position_mask"
# Patches of an image, each preceded by its row and column index.
_FLAT_PATCHES = "flattened_patches"
GRID = "image_grid_thw"
# Seconds between the frames of each video. Real images have no such argument; videos are passed under this name.
SECONDS = "image_seconds"
# Substrings of argument names whose entries do not correspond to samples one to one.
NOT_OF_ROWS = ("video", "audio", "input_features", "input_values", "feature_attention_mask", "image_pixel_values")
# Arguments with an entry for each image.
_ONE_PER_IMAGE = (
    *(GRID, "image_grid_hw", "image_sizes", "image_merge_sizes", "image_position_ids"),
    *("spatial_shapes", "target_sizes", "num_local_patches", "patches_grid", "image_grids", "image_num_crops"),
    SECONDS,
)
# Q-Former question for each image (InstructBLIP).
_QUESTIONS = ("qformer_input_ids", "qformer_attention_mask")
# Name under which lengths of other modalities are passed; placeholders are divided in proportion to them.
ENTRIES = "image_num_crops"
# Sizes whose product is the number of patches or crops of an image.
_PATCHES = (GRID, "image_grid_hw", "target_sizes", "image_num_crops")
# Patch indices (over all images) pooled into each placeholder; two grids `[rows, columns]` of placeholders per image.
_POOLED, _POOLED_GRIDS = "image_token_pooling", "image_grids"
# Local views of all images, concatenated, and the number of views of each image.
_VIEWS, _NUMBER_OF_VIEWS = "pixel_values_local", "num_local_patches"
# Number of dims of pixels for cross-attention layers: `[samples, images, tiles, channels, height, width]`.
_TILES_OF_ROWS = 6
# Number of images of each sample.
_PER_ROW = ("batch_num_images",)
VIDEO_PIXELS = "pixel_values_videos"
# Audio inputs: features, waveform samples or tokens of clips.
SOUNDS = ("input_features", "input_values", "audio_input_ids", "audio_input_features")


def image_token(config: Any) -> int | None:
    """Returns the placeholder token id of images, under any of its config names; `None` if there is none.

    Models that read only videos have the placeholder of videos instead.
    """
    token_ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index", "video_token_index"))
    return next((token for token in token_ids if token is not None), None)


def is_image_argument(name: str) -> bool:
    """Returns whether an argument has one entry per image, patch or crop."""
    is_named = (
        name in (*_ONE_PER_IMAGE, *_QUESTIONS, *_PER_ROW) or name.startswith("image_") or _is_pixel_argument(name)
    )
    return is_named and "video" not in name and name != PLACES


def is_multimodal(name: str) -> bool:
    """Returns whether an argument has entries for images, videos or audio clips rather than for samples."""
    return is_image_argument(name) or any(part in name for part in ("pixel", *NOT_OF_ROWS))


def _is_pixel_argument(name: str) -> bool:
    return "pixel" in name or name == _FLAT_PATCHES


def get_pixels(arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the pixels of a call, in one of the shapes that `rows_with_images` lists; `None` without images."""
    candidates = (arguments.get(name) for name in (PIXELS, _FLAT_PATCHES))
    return next((pixels for pixels in candidates if isinstance(pixels, Tensor)), None)


def has_places(arguments: Mapping[str, Any], config: Any) -> bool:
    """Returns whether images have placeholder positions in the text."""
    return image_token(config) is not None or arguments.get(PLACES) is not None


def without_pixels(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Removes pixels and audio from a call of a stage without encoders; placeholders and sizes are kept."""
    left_out = {
        name for name in arguments if _is_pixel_argument(name) and (is_image_argument(name) or name == VIDEO_PIXELS)
    }
    left_out |= arguments.keys() & {*SOUNDS}
    return {name: value for name, value in arguments.items() if name not in left_out}


def placeholders(arguments: Mapping[str, Any], config: Any) -> Tensor:
    """Returns the mask `[batch, sequence]` of image placeholder positions."""
    places = arguments.get(PLACES)
    if isinstance(places, Tensor):
        return places != 0
    ids, token = arguments["input_ids"], image_token(config)
    return torch.zeros_like(ids, dtype=torch.bool) if token is None else ids == token


def count_image_tokens(arguments: Mapping[str, Any], config: Any) -> list[int]:
    """Returns the number of placeholders of each image of a batch.

    Raises:
        ConfigError: the placeholders do not match the images, or an image spans two samples.
    """
    is_image = placeholders(arguments, config)
    per_row = is_image.sum(1).tolist()
    ends = {0, *itertools.accumulate(per_row)}
    images, counts = _count(arguments), []
    for counts in _guesses(arguments, config, is_image, images):
        if all(counts) and sum(counts) == sum(per_row) and ends <= {0, *itertools.accumulate(counts)}:
            return counts
    if counts and all(counts) and sum(counts) == sum(per_row):
        raise ConfigError(
            "The placeholders of one image span two samples of input_ids; each image must belong to one sample."
        )
    raise ConfigError(
        f"input_ids has {sum(per_row)} image placeholders, but its {images} images need {sum(counts) or images}."
    )


def rows_with_images(arguments: Mapping[str, Any], rows: slice, config: Any) -> dict[str, Any]:
    """Returns the image arguments of a range of samples, empty if these samples have no images.

    Args:
        arguments (`Mapping`): `input_ids` `[batch, sequence]`; `pixel_values` in one of these shapes, and other
            arguments with matching entries:

            - `[images, ...]`, with or without sizes `[images, ...]`;
            - `[patches, ...]` or `[1, ..., patches * width]` of all images, and a grid `[images, 2 or 3]`;
            - `[crops, patches, ...]` of all images, with the number of crops `[images]` and the patch indices of each
              placeholder, counted over all images;
            - `[batch, images, channels, height, width]`, padded to the same number of images per sample;
            - `[batch, images, tiles, channels, height, width]`, which samples without placeholders keep too;
            - `[batch, ...]`, for models without placeholders in the text.
        rows (`slice`): range of samples of the batch.
        config (`PreTrainedConfig`): config of the model.

    Raises:
        ConfigError: the placeholders of an image span two samples, or their number does not match the image.
    """
    ids = arguments["input_ids"]
    image_arguments = {
        name: value for name, value in arguments.items() if is_image_argument(name) and _has_entries(value)
    }
    per_row = placeholders(arguments, config).sum(1).tolist()
    start, stop, _ = rows.indices(len(ids))
    if not has_places(arguments, config):
        return {name: _entries(name, value, len(ids), slice(start, stop)) for name, value in image_arguments.items()}
    if _is_batch_first(arguments, sum(per_row)):
        cut = {name: _entries(name, value, len(ids), slice(start, stop)) for name, value in image_arguments.items()}
        return cut if sum(per_row[start:stop]) or arguments[PIXELS].dim() == _TILES_OF_ROWS else {}
    ends = [0, *itertools.accumulate(count_image_tokens(arguments, config))]
    images = slice(*(ends.index(sum(per_row[:row])) for row in (start, stop)))
    if images.start == images.stop:
        return {}
    sliced = {}
    for name, value in image_arguments.items():
        if name in _PER_ROW:
            sliced[name] = _entries(name, value, len(ids), slice(start, stop))
        elif name == _POOLED:
            sliced[name] = _slice_pooled(arguments, slice(ends[images.start], ends[images.stop]), images)
        elif name == _VIEWS:
            ends_of_views = [0, *itertools.accumulate(int(count) for count in arguments[_NUMBER_OF_VIEWS])]
            views = slice(*(ends_of_views[place] for place in (images.start, images.stop)))
            # Omit the argument if no views are left: the encoder does not accept an empty tensor.
            sliced |= {name: part} if len(part := _entries(name, value, ends_of_views[-1], views)) else {}
        elif name != PIXELS or len(value) == len(ends) - 1:
            sliced[name] = _entries(name, value, len(ends) - 1, images)
        else:
            sliced[name] = _slice_patches(arguments, images)
    return sliced


def _has_entries(value: Any) -> bool:
    return isinstance(value, Tensor | list | tuple)


def _is_batch_first(arguments: Mapping[str, Any], placeholders: int) -> bool:
    """Returns whether the first dim of the pixels is the batch, `[batch, images, ...]`, and not the images."""
    pixels = get_pixels(arguments)
    assert pixels is not None
    if pixels.dim() == _TILES_OF_ROWS:
        return True
    has_sizes = any(isinstance(arguments.get(name), Tensor) for name in (*_ONE_PER_IMAGE, *_QUESTIONS))
    return pixels.dim() > 4 and not has_sizes and len(pixels) != placeholders


def _count(arguments: Mapping[str, Any]) -> int:
    """Returns the number of images of a batch."""
    sizes = (arguments.get(name) for name in (*_ONE_PER_IMAGE, PIXELS, _FLAT_PATCHES))
    return next(len(size) for size in sizes if isinstance(size, Tensor))


def _guesses(arguments: Mapping[str, Any], config: Any, is_image: Tensor, images: int) -> Iterator[list[int]]:
    """Yields candidates for the number of placeholders of each image, the most reliable first."""
    total = int(is_image.sum())
    if isinstance(arguments.get(GRID), Tensor):
        merged = getattr(config.vision_config, "spatial_merge_size", 1) ** 2
        yield (arguments[GRID].prod(1) // merged).tolist()
    if isinstance(arguments.get(_POOLED_GRIDS), Tensor) and arguments[_POOLED_GRIDS].shape[-1] == 4:
        yield arguments[_POOLED_GRIDS].unflatten(-1, (2, 2)).prod(-1).sum(-1).tolist()
    runs = _runs(is_image)
    if len(runs) == images and (_PER_ROW[0] in arguments or _agree(runs, arguments)):
        yield runs
    patches = next((arguments[name] for name in _PATCHES if isinstance(arguments.get(name), Tensor)), None)
    if patches is not None:
        counts = _count_patches(patches)
        yield [total * count // sum(counts) for count in counts]
    yield [total // images] * images


def _runs(is_image: Tensor) -> list[int]:
    """Returns the lengths of the runs of `True` in a mask `[batch, sequence]`, sample by sample."""
    groups = (itertools.groupby(row) for row in is_image.tolist())
    return [sum(1 for _ in group) for row in groups for value, group in row if value]


def _agree(lengths: list[int], arguments: Mapping[str, Any]) -> bool:
    """Returns whether images of the same size have the same number of placeholders."""
    sizes = [arguments[name] for name in _ONE_PER_IMAGE if _has_entries(arguments.get(name))]
    keys = [
        tuple(str(size.tolist() if isinstance(size, Tensor) else size) for size in of_one)
        for of_one in zip(*sizes, strict=False)
    ]
    keys = keys or [()] * len(lengths)
    return len({*zip(keys, lengths, strict=True)}) == len({*keys})


def _entries(name: str, value: Any, count: int, part: slice) -> Any:
    if len(value) != count:
        raise ConfigError(
            f"{name} has {len(value)} entries for {count} images, image parts or samples: the entries cannot be "
            "assigned to the samples of the batch."
        )
    return value[part]


def _slice_patches(arguments: Mapping[str, Any], images: slice) -> Tensor:
    """Returns the pixels of a range of images out of `[patches, ...]` or `[1, ..., patches * width]` of all images."""
    pixels = arguments[PIXELS]
    grid = next((arguments[name] for name in _PATCHES if isinstance(arguments.get(name), Tensor)), None)
    ends = [0] if grid is None else [0, *itertools.accumulate(_count_patches(grid))]
    dim = 0 if len(pixels) == ends[-1] else pixels.dim() - 1
    width, rest = divmod(pixels.shape[dim], ends[-1]) if ends[-1] else (0, 1)
    if rest or (dim and len(pixels) != 1):
        raise ConfigError(
            f"{PIXELS} of shape {tuple(pixels.shape)} for {_count(arguments)} images of {ends[-1]} patches: the pixels "
            "cannot be assigned to the samples of the batch."
        )
    first, last = (ends[place] * width for place in (images.start, images.stop))
    return pixels.narrow(dim, first, last - first)


def _count_patches(sizes: Tensor) -> list[int]:
    """Returns the number of patches of each image for sizes `[images]` or `[images, dims]`."""
    return sizes.reshape(len(sizes), -1).prod(1).tolist()


def _slice_pooled(arguments: Mapping[str, Any], placeholders: slice, images: slice) -> Tensor:
    """Returns the pooled patch indices `[placeholders, patches]` relative to the first of the images; -1 is padding."""
    crops = _count_patches(arguments[_PATCHES[-1]])
    before = sum(crops[: images.start]) * arguments[PIXELS].shape[1]
    pooled = arguments[_POOLED][placeholders]
    return pooled.where(pooled < 0, pooled - before)
