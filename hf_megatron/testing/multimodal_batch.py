"""Multimodal batches for a tiny model: samples with one, two and no images, videos or audio clips of several sizes."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.modalities.audio import FRAMES_OF_TOKEN, audio_token
from ..models.modalities.images import PIXELS, PLACES, SOUNDS, VIDEO_PIXELS, image_token
from ..models.modalities.videos import video_token
from .audio_inputs import audio_inputs
from .image_inputs import Canvas, draw_sample_tiles, image_forms, video_form
from .tiny_model import plain_tokens

# Number of images per sample, repeated cyclically.
_IMAGES = (1, 2, 0)
# Number of videos or audio clips per sample, repeated cyclically.
_VIDEOS = (1, 0, 2)
# Maximum number of tokens of an audio clip.
_TOKENS_OF_SOUND = 64
# Additional text tokens per sample, for models that add audio features to text tokens.
_TOKENS_BETWEEN = 6
_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Methods that compute features of images, or of videos in video-only models.
_FEATURES = ("get_image_features", "get_video_features")
# Exceptions that models raise for images in an unsupported format.
_UNFIT = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NameError)


@dataclass(frozen=True)
class _Piece:
    """Item of a sample between texts: an image, an audio clip or a video, whose frames may be separated by text.

    Attributes:
        kind: token type: 0 for text, 1 for images, 2 for videos, 3 for audio.
        token: placeholder token, or `None` for random text tokens.
        sizes: number of tokens of each contiguous run.
    """

    kind: int
    token: int | None
    sizes: tuple[int, ...]


def make_multimodal_batch(
    model: Any, *, batch_size: int = 3, seed: int = 0, videos: bool = False, audio_clips: bool = False
) -> dict[str, Tensor]:
    """Returns a batch of samples of unequal length, right-padded to the longest.

    An image has as many placeholders as the model computes features for it.

    Args:
        model (`PreTrainedModel`): a model with image placeholders in its text, or with one image per sample.
        batch_size (`int`, defaults to 3): number of samples.
        seed (`int`, defaults to 0): seed of tokens and pixels.
        videos (`bool`): include videos in addition to images, or alone if the model takes either.
        audio_clips (`bool`): include audio in addition to images, or alone if the model takes no images.

    Returns:
        `dict[str, Tensor]`: `input_ids`, `attention_mask`, `labels` and the token types that the model accepts, all
        `[batch, sequence]`; images in the format of the model, see `modalities.images.rows_with_images`.

    Raises:
        ValueError: with `videos` or `audio_clips`, the model does not accept any known format of them.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = inspect.signature(model.forward).parameters
    has_places = image_token(model.config) is not None or PLACES in parameters
    counts = [_IMAGES[row % len(_IMAGES)] if has_places else 1 for row in range(batch_size)]
    if PIXELS not in parameters and "flattened_patches" not in parameters:
        counts = [0] * batch_size
    images, sizes = _images(model, counts, generator) if any(counts) else ({}, [])
    left = iter(sizes)
    pieces = [[_Piece(1, image_token(model.config), (next(left),)) for _ in range(count)] for count in counts]
    if not videos and not audio_clips:
        return _written(model, pieces, images, generator)
    problems: list[str] = []
    for tensors, batch_pieces in (_with_videos if videos else _with_audio_clips)(model, pieces, images, generator):
        batch = _written(model, batch_pieces, tensors, generator)
        try:
            if _depends_on(model, batch, VIDEO_PIXELS if videos else next(name for name in SOUNDS if name in batch)):
                return batch
            problems.append("its loss does not depend on them")
        except (*_UNFIT, StopIteration) as error:
            problems.append(str(error))
    kind = "videos" if videos else "audio"
    raise ValueError(f"{type(model).__name__} accepts no {kind} in a known format: {'; '.join(problems)[:300]}")


def _written(
    model: Any, pieces: Sequence[Sequence[_Piece]], modalities: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns a batch of text samples with the given items in between."""
    parameters, tokens = inspect.signature(model.forward).parameters, plain_tokens(model.config)

    def text(length: int) -> list[int]:
        return tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist()

    # Start token of an item, after which position ids restart in models that have one.
    names = ("vision_start_token_id",) * 2 + ("audio_start_token_id",)
    starts = [[token for token in [getattr(model.config, name, None)] if token is not None] for name in names]
    rows, places = [], []
    for row, of_row in enumerate(pieces):
        rows.append(text(4 + row))
        places.append([0] * len(rows[-1]))
        for piece in of_row:
            start = starts[piece.kind - 1]
            for size in piece.sizes:
                rows[-1] += start + (text(size) if piece.token is None else [piece.token] * size) + text(3)
                places[-1] += [0] * len(start) + [piece.kind] * size + [0] * 3
    length, pad = max(map(len, rows)), getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    input_ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    kinds = torch.tensor([row + [0] * (length - len(row)) for row in places])
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill((attention_mask == 0) | (kinds > 0), -100),
    }
    batch |= {name: kinds for name in _KINDS_OF_TOKENS if name in parameters}
    if PLACES in parameters:
        batch[PLACES] = (kinds == 1).long()
    if "cross_attention_mask" in parameters:
        batch["cross_attention_mask"] = _seen_tiles(kinds > 0, modalities["aspect_ratio_mask"])
    return batch | dict(modalities)


def _with_videos(
    model: Any, pieces: Sequence[Sequence[_Piece]], images: Mapping[str, Tensor], generator: torch.Generator
) -> Iterator[tuple[dict[str, Tensor], list[list[_Piece]]]]:
    """Yields batches with images and videos, then with videos alone; each with contiguous videos, then by frame."""
    token, parts = video_token(model.config), (model, model.base_model)
    named = [part for part in parts if "get_video_features" in dir(type(part))]
    if VIDEO_PIXELS not in inspect.signature(model.forward).parameters or not named:
        return
    counts = [_VIDEOS[row % len(_VIDEOS)] for row in range(len(pieces))]
    argument_names = {*inspect.signature(model.forward).parameters}
    videos = video_form(Canvas(model.config, generator), argument_names, sum(counts), images)
    # Some classes pass on keyword arguments that only the base model's method declares.
    taken = {name for part in named for name in inspect.signature(part.get_video_features).parameters}
    of_features = {name: value for name, value in videos.items() if name in taken}
    sizes = _features(named[0].get_video_features, of_features, sum(counts))
    grids = videos.get("video_grid_thw")
    frames = [1] * len(sizes) if grids is None else grids[:, 0].tolist()
    for with_images in (True, False):
        of_video = token if with_images else image_token(model.config)
        if with_images and token in (None, image_token(model.config)):
            continue
        for is_apart in (False, True):
            left = iter(
                _Piece(2, of_video, (size // number,) * number if is_apart else (size,))
                for size, number in zip(sizes, frames, strict=True)
            )
            batch_pieces = [
                [*(of_row if with_images else ()), *(next(left) for _ in range(count))]
                for of_row, count in zip(pieces, counts, strict=True)
            ]
            yield (dict(images) if with_images else {}) | videos, batch_pieces


def _with_audio_clips(
    model: Any, pieces: Sequence[Sequence[_Piece]], images: Mapping[str, Tensor], generator: torch.Generator
) -> Iterator[tuple[dict[str, Tensor], list[list[_Piece]]]]:
    """Yields batches with images followed by audio clips, in every format of `audio_inputs`."""
    argument_names, token = {*inspect.signature(model.forward).parameters}, audio_token(model.config)
    if token is None and (frames := getattr(model.config, FRAMES_OF_TOKEN, None)) is not None:
        # One clip per sample, as long as its text.
        texts = [[_Piece(0, None, (_TOKENS_BETWEEN,))] for _ in pieces]
        length = _written(model, texts, {}, generator)["input_ids"].shape[1]
        for audio_clips in audio_inputs(model.config, argument_names, len(pieces), generator, frames=frames * length):
            yield audio_clips, texts
        return
    counts = [_VIDEOS[row % len(_VIDEOS)] for row in range(len(pieces))]
    for audio_clips in audio_inputs(model.config, argument_names, sum(counts), generator):
        clips = [{name: value[clip : clip + 1] for name, value in audio_clips.items()} for clip in range(sum(counts))]
        # Every other clip is shorter.
        of_length = [_count_clip_tokens(model, clip, token, generator) for clip in clips[:2]]
        sizes = [of_length[clip % 2] for clip in range(len(clips))]
        left = iter(_Piece(3, token, (size,)) for size in sizes)
        yield (
            {**images, **audio_clips, **_lengths(argument_names, sizes)},
            [[*of_row, *(next(left) for _ in range(count))] for of_row, count in zip(pieces, counts, strict=True)],
        )


def _count_clip_tokens(model: Any, clip: Mapping[str, Tensor], token: int | None, generator: torch.Generator) -> int:
    """Returns the number of placeholders with which the model accepts a clip, or 1 if there is none.

    In the latter case the model will reject the batch.
    """
    argument_names = {*inspect.signature(model.forward).parameters}
    # Try the largest number first: some models accept more features than placeholders.
    for size in range(_TOKENS_OF_SOUND, 0, -1):
        try:
            with torch.no_grad():
                model(
                    **_written(
                        model, [[_Piece(3, token, (size,))]], {**clip, **_lengths(argument_names, [size])}, generator
                    )
                )
            return size
        except _UNFIT:
            continue
    return 1


def _lengths(argument_names: set[str], sizes: Sequence[int]) -> dict[str, Tensor]:
    return {"audio_embed_sizes": torch.tensor(sizes)} if "audio_embed_sizes" in argument_names else {}


def _depends_on(model: Any, batch: Mapping[str, Tensor], name: str) -> bool:
    """Returns whether the loss depends on an argument, such as video pixels or audio."""
    others = {**batch, name: torch.zeros_like(batch[name])}
    with torch.no_grad():
        losses = [model.eval()(**inputs).loss.item() for inputs in (batch, others)]
    model.train()
    return losses[0] != losses[1]


def _images(model: Any, counts: Sequence[int], generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Returns the images in the first format that the model accepts, and the number of features of each image."""
    canvas, argument_names = Canvas(model.config, generator), {*inspect.signature(model.forward).parameters}
    if "aspect_ratio_ids" in argument_names:
        # Cross-attention layers read the images; each image has one token in the text.
        return draw_sample_tiles(canvas, counts), [1] * sum(counts)
    named = [(part, name) for part in (model, model.base_model) for name in _FEATURES if name in dir(type(part))]
    if not named:
        # The config may have the number of features; else there are none in the text.
        form = next(image_forms(canvas, argument_names, counts))
        return form(), [getattr(model.config, "latent_query_num", 0)] * sum(counts)
    features = getattr(*named[0])
    argument_names |= {*inspect.signature(features).parameters}
    problems = []
    for form in image_forms(canvas, argument_names, counts):
        images = form()
        try:
            return images, _features(features, images, sum(counts))
        except _UNFIT as error:
            problems.append(str(error))
    raise RuntimeError("; ".join(problems))


def _seen_tiles(is_image: Tensor, tiles: Tensor) -> Tensor:
    """Returns the visible tiles, `[batch, sequence, images, tiles]`: a token sees the images that start up to it."""
    begun = is_image.cumsum(1)[..., None] > torch.arange(tiles.shape[1])
    return begun[..., None].long() * tiles[:, None]


def _features(features: Callable[..., Any], images: Mapping[str, Tensor], total: int) -> list[int]:
    """Returns the number of features that the model computes for each image."""
    with torch.no_grad():
        output = features(**images)
        embeddings = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    parts = [embeddings] if isinstance(embeddings, Tensor) else embeddings
    lengths = [part.numel() // part.shape[-1] for part in parts]
    return lengths if len(lengths) == total else [sum(lengths) // total] * total
