"""Image and video input formats of models: full images, patches, tiles or crops, per sample or for the full batch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.modalities.images import GRID, PIXELS, VIDEO_PIXELS

# Config names whose product is the number of patches along a side that are merged into one feature.
_MERGES = (
    *("spatial_merge_size", "merge_size", "merge_kernel_size", "window_kernel_size", "pooling_kernel_size"),
    *("downsample_factor", "scale_factor"),
)
# Frames of a video.
_FRAMES = 2


class Canvas:
    """Image geometry of a model, read from its configs, and random pixels.

    Args:
        config (`PreTrainedConfig`): config of the model.
        generator (`torch.Generator`): generator of the pixels.
    """

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        # A multimodal encoder (of an encoder-decoder) contains the vision config.
        owner = getattr(config, "encoder", None) or config
        vision = getattr(owner, "vision_config", None) or getattr(config, "vq_config", None) or config
        # The first of several vision encoders in sequence.
        vision = getattr(vision, "sam_config", None) or vision
        self.values: Mapping[str, Any] = config.to_dict() | vision.to_dict()
        self.channels = next(
            (self.values[name] for name in ("num_channels", "in_channels", "in_chans") if self.values.get(name)), 3
        )
        self.patch = _side(self.values.get("patch_size") or 1)
        self.unit = math.prod(_side(self.values[name]) for name in _MERGES if self.values.get(name))
        if merged := getattr(vision, "model_patch_size", None):
            # Patches are merged before the vision encoder.
            self.patch, self.unit = merged, 2
        if halvings := len(self.values.get("channel_multiplier") or ()):
            # Convolutional encoder: each level but the last halves the resolution.
            self.patch = 2 ** (halvings - 1)
        if isinstance(self.values.get("downsample_ratio"), float):
            self.unit *= round(1 / self.values["downsample_ratio"])
        self.frames = self.values.get("temporal_patch_size") or self.values.get("patch_temporal") or 1
        size: Any = self.values.get("image_size") or 4 * self.patch * self.unit
        self.height: int
        self.width: int
        self.height, self.width = (size, size) if isinstance(size, int) else size
        # Models without a grid of the concatenated patches: every image is a single patch.
        self.is_of_patches = "patch_dim" in dir(type(config))
        self._generator = generator

    def draw(self, *shape: int) -> Tensor:
        """Draws pixels of any shape."""
        return torch.randn(*shape, generator=self._generator)

    def tokens(self, part: str, like: Tensor) -> Tensor:
        """Draws non-padding tokens of a sub-config's vocabulary, in the shape of another tensor."""
        return torch.randint(1, self.values[part]["vocab_size"], like.shape, generator=self._generator)

    def grids(self, count: int) -> Tensor:
        """Returns the height and width of each image in patches, `[images, 2]`, alternating between two sizes."""
        return torch.tensor([[self.unit * (1 + image % 2), self.unit * 2] for image in range(count)])


def _side(value: Any) -> int:
    return value if isinstance(value, int) else value[-1]


def image_forms(
    canvas: Canvas, argument_names: set[str], counts: Sequence[int]
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields functions that draw images in the formats that a model's argument names allow, most specific first."""
    total = sum(counts)
    if argument_names & {"image_grid_thw", "image_grid_hw"}:
        side, merged = canvas.patch, canvas.patch * canvas.unit
        yield lambda: _patches(canvas, argument_names, total, (canvas.frames * canvas.channels * side**2,))
        yield lambda: _patches(canvas, argument_names, total, (canvas.channels, side, side))
        yield lambda: _patches(canvas, argument_names, total, (merged, merged, canvas.channels), merged=canvas.unit)
    elif canvas.frames > 1:
        yield lambda: {PIXELS: canvas.draw(total, canvas.frames, canvas.patch, canvas.patch, canvas.channels)}
    if "target_sizes" in argument_names:
        yield lambda: _packed(canvas, total)
    if "spatial_shapes" in argument_names or "image_position_ids" in argument_names:
        yield lambda: _padded_patches(canvas, argument_names, total)
    if "image_sizes" in argument_names and canvas.values.get("image_grid_pinpoints"):
        yield lambda: _tiles(canvas, argument_names, counts)
    if "image_token_pooling" in argument_names:
        yield lambda: _crops(canvas, total)
    if "pixel_attention_mask" in argument_names:
        yield lambda: _of_rows(canvas, counts, of_pixels=True)
        yield lambda: _of_rows(canvas, counts, of_pixels=False)
    if "flattened_patches" in argument_names:
        yield lambda: _flat_patches(canvas, total)
    if "qformer_input_ids" in argument_names:
        yield lambda: _with_questions(canvas, total)
        yield lambda: _with_questions(canvas, total, _FRAMES)
    yield lambda: _full_images(canvas, argument_names, total)
    if "num_local_patches" in argument_names:
        # Or as lists instead of tensors.
        yield lambda: {
            name: _as_list(name, value) for name, value in _full_images(canvas, argument_names, total).items()
        }
    # Models that support several kinds of vision encoders may use one that accepts no sizes.
    yield lambda: _full_images(canvas, argument_names - {"image_sizes"}, total)
    # Models without a vision encoder project raw patches.
    if canvas.is_of_patches:
        yield lambda: {PIXELS: canvas.draw(total, canvas.channels * canvas.patch**2)}
    num_patches = canvas.height // canvas.patch * (canvas.width // canvas.patch)
    yield lambda: {PIXELS: canvas.draw(total, num_patches, canvas.channels * canvas.patch**2)}


def video_form(canvas: Canvas, argument_names: set[str], total: int, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns videos of two and four frames in patches of the images' shape, or of two full frames.

    Args:
        canvas (`Canvas`): image geometry of the model.
        argument_names (`set[str]`): argument names of the model's forward.
        total (`int`): number of videos.
        images (`Mapping`): images in the format of the model.
    """
    if "video_grid_thw" not in argument_names:
        inputs = {VIDEO_PIXELS: canvas.draw(total, _FRAMES, canvas.channels, canvas.height, canvas.width)}
        if "image_sizes_videos" in argument_names:
            inputs["image_sizes_videos"] = torch.tensor([[canvas.height, canvas.width]] * total)
        return inputs
    sizes = images[GRID][:, 1:].repeat(total, 1)[:total]
    frames = torch.tensor([[_FRAMES * (1 + video % 2)] for video in range(total)])
    grids = torch.cat([frames, sizes], 1)
    inputs = {VIDEO_PIXELS: canvas.draw(int(grids.prod(1).sum()), *images[PIXELS].shape[1:]), "video_grid_thw": grids}
    if "video_merge_sizes" in argument_names:
        inputs["video_merge_sizes"] = images["image_merge_sizes"].repeat(total)[:total]
    for name in ("second_per_grid_ts", "video_second_per_grid"):
        if name in argument_names:
            inputs[name] = torch.tensor([1.0 + video % 2 for video in range(total)])
    return inputs


def _patches(
    canvas: Canvas, argument_names: set[str], total: int, shape: tuple[int, ...], merged: int = 1
) -> dict[str, Tensor]:
    """Returns the concatenated patches of all images, `[patches, *shape]`, with `merged` encoder patches per side."""
    grids = canvas.grids(total) // merged
    sizes = {"image_grid_hw": grids, "image_grid_thw": torch.cat([torch.ones(total, 1, dtype=torch.long), grids], 1)}
    inputs = {PIXELS: canvas.draw(int(grids.prod(1).sum()), *shape)}
    inputs |= {name: value for name, value in sizes.items() if name in argument_names}
    if "image_merge_sizes" in argument_names:
        inputs["image_merge_sizes"] = torch.full((total,), canvas.unit)
    return inputs


def _packed(canvas: Canvas, total: int) -> dict[str, Tensor]:
    """Returns the patches of all images along the width, `[1, channels, patch, patches * patch]`."""
    grids = canvas.grids(total)
    width = int(grids.prod(1).sum()) * canvas.patch
    return {PIXELS: canvas.draw(1, canvas.channels, canvas.patch, width), "target_sizes": grids.int()}


def _padded_patches(canvas: Canvas, argument_names: set[str], total: int) -> dict[str, Tensor]:
    """Returns the right-padded patches of each image, `[images, patches, width]`."""
    grids = canvas.grids(total)
    lengths = grids.prod(1)
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    pixels = canvas.draw(total, longest, canvas.channels * canvas.patch**2) * mask[..., None]
    if "spatial_shapes" in argument_names:
        return {PIXELS: pixels, "spatial_shapes": grids, "pixel_attention_mask": mask.long()}
    places = torch.full((total, longest, 2), -1)
    for image, (height, width) in enumerate(grids.tolist()):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places[image, : height * width] = torch.stack([columns, rows], -1).flatten(0, 1)
    return {PIXELS: pixels, "image_position_ids": places}


def _tiles(canvas: Canvas, argument_names: set[str], counts: Sequence[int]) -> dict[str, Tensor]:
    """Returns a thumbnail and tiles of each image, padded: `[images, tiles, channels, height, width]`."""
    total, side = sum(counts), min(canvas.height, canvas.width)
    grids = sorted(canvas.values["image_grid_pinpoints"])[:2]
    # The width is not a multiple of the tile width, so that the model removes padding.
    sizes = torch.tensor([[grids[image % len(grids)][0], grids[image % len(grids)][1] - 1] for image in range(total)])
    tiles = 1 + max(math.prod(length // side for length in grid) for grid in grids)
    inputs = {PIXELS: canvas.draw(total, tiles, canvas.channels, canvas.height, canvas.width), "image_sizes": sizes}
    if "batch_num_images" in argument_names:
        inputs["batch_num_images"] = torch.tensor(counts)
    return inputs


def _crops(canvas: Canvas, total: int) -> dict[str, Tensor]:
    """Returns crops of images in patches, `[crops, patches, width]`, and the patch indices that each feature pools."""
    rows, columns = canvas.height // canvas.patch, canvas.width // canvas.patch
    # The first crop is the full image.
    crop_counts = torch.tensor([2 + image % 2 for image in range(total)])
    places = torch.arange(int(crop_counts.sum()) * rows * columns).view(-1, rows // 2, 2, columns // 2, 2)
    pooled = places.transpose(2, 3).reshape(-1, 4).clone()
    # A missing patch at the edge.
    pooled[::5, -1] = -1
    base_grids = torch.tensor([rows // 2, columns // 2]).repeat(total, 1)
    return {
        PIXELS: canvas.draw(int(crop_counts.sum()), rows * columns, canvas.channels * canvas.patch**2),
        "image_token_pooling": pooled,
        "image_grids": torch.cat(
            [base_grids, base_grids * torch.stack([crop_counts - 1, torch.ones_like(crop_counts)], 1)], 1
        ),
        "image_num_crops": crop_counts,
    }


def _of_rows(canvas: Canvas, counts: Sequence[int], *, of_pixels: bool) -> dict[str, Tensor]:
    """Returns the images of each sample, `[batch, images, channels, height, width]`, padded with zero images.

    The mask is per pixel, `[batch, images, height, width]`, or per image, `[batch, images]`.
    """
    is_there = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    pixels = canvas.draw(*is_there.shape, canvas.channels, canvas.height, canvas.width)
    mask = is_there[..., None, None].repeat(1, 1, canvas.height, canvas.width)
    if of_pixels:
        # All images but the first of a sample have a smaller height.
        mask[:, 1:, canvas.height - canvas.patch :] = False
    pixels = pixels * mask[:, :, None]
    return {PIXELS: pixels, "pixel_attention_mask": mask if of_pixels else is_there}


def _flat_patches(canvas: Canvas, total: int) -> dict[str, Tensor]:
    """Returns zero-padded patches of images of two sizes, each preceded by its 1-based row and column index."""
    grids = torch.tensor([[1 + image % 2, 3] for image in range(total)])
    patches = torch.zeros(total, int(grids.prod(1).max()), 2 + canvas.values["patch_embed_hidden_size"])
    for image, grid in enumerate(grids.tolist()):
        positions = torch.cartesian_prod(*(torch.arange(1, side + 1) for side in grid))
        patches[image, : len(positions)] = torch.cat([positions, canvas.draw(len(positions), patches.shape[-1] - 2)], 1)
    return {"flattened_patches": patches}


def _with_questions(canvas: Canvas, total: int, *frames: int) -> dict[str, Tensor]:
    """Returns images `[images, channels, height, width]`, or videos, and padded tokens of a question about each."""
    lengths = torch.tensor([4 + image % 3 for image in range(total)])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return {
        PIXELS: canvas.draw(total, *frames, canvas.channels, canvas.height, canvas.width),
        "qformer_input_ids": canvas.tokens("qformer_config", mask) * mask,
        "qformer_attention_mask": mask.long(),
    }


def draw_sample_tiles(canvas: Canvas, counts: Sequence[int]) -> dict[str, Tensor]:
    """Returns the images of each sample as tiles in two aspect ratios.

    The pixels are `[batch, images, tiles, channels, height, width]`.
    """
    ratios = [math.prod(ratio) for ratio in canvas.values["supported_aspect_ratios"]]
    tiles, most = canvas.values["max_num_tiles"], max(counts)
    # Aspect ratio ids start at 1; 0 is a padding image, whose first tile is visible too.
    kinds = torch.tensor([[1 + image % 2 if image < count else 0 for image in range(most)] for count in counts])
    mask = torch.arange(tiles) < torch.tensor([1, *ratios])[kinds][..., None]
    pixels = canvas.draw(*mask.shape, canvas.channels, canvas.height, canvas.width)
    pixels = pixels * (mask & (kinds > 0)[..., None])[..., None, None, None]
    return {PIXELS: pixels, "aspect_ratio_ids": kinds, "aspect_ratio_mask": mask.long()}


def _full_images(canvas: Canvas, asked: set[str], total: int) -> dict[str, Tensor]:
    """Returns full images of one size, `[images, channels, height, width]`."""
    images = {PIXELS: canvas.draw(total, canvas.channels, canvas.height, canvas.width)}
    if "high_res_pixel_values" in asked:
        side = canvas.values["high_res_vision_config"]["image_size"]
        images["high_res_pixel_values"] = canvas.draw(total, canvas.channels, side, side)
    if "pixel_values_local" in asked:
        # Grids (columns, rows) of local views; the number of views differs between images.
        grids = [[1 + image % 2, 2] for image in range(total)]
        numbers = [math.prod(grid) for grid in grids]
        views = {"num_local_patches": torch.tensor(numbers), "patches_grid": torch.tensor(grids)}
        images |= {name: value for name, value in views.items() if name in asked}
        images["pixel_values_local"] = canvas.draw(sum(numbers), canvas.channels, canvas.height, canvas.width)
    if "image_sizes" in asked:
        images["image_sizes"] = torch.tensor([[canvas.height, canvas.width]] * total)
    return images


def _as_list(name: str, value: Tensor) -> Any:
    return value.tolist() if name in ("num_local_patches", "patches_grid") else value
