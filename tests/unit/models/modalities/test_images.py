"""Tests that images follow the samples that contain their placeholders."""

import pytest
import torch
from transformers import GitConfig, InstructBlipVideoConfig, InternVLConfig, Kosmos2Config, Molmo2Config, Qwen2VLConfig

from hf_megatron import ConfigError, UnsupportedError
from hf_megatron.models.modalities.images import rows_with_images, without_pixels
from hf_megatron.pipeline_parallel.microbatches import split

IMAGE = 9
INPUT_IDS = [[1, IMAGE, IMAGE, 2, 3, 4, 5], [IMAGE, IMAGE, 1, IMAGE, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6, 7]]


def make_full_images():
    return {"input_ids": torch.tensor(INPUT_IDS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}


def make_patches():
    ids = torch.tensor([[1, IMAGE, 2, 3, 4, 5], [IMAGE, IMAGE, 1, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
    return {"input_ids": ids, "pixel_values": torch.arange(16.0).view(16, 1), "image_grid_thw": grid}


def test_full_images():
    config = InternVLConfig(image_token_id=IMAGE)
    batches = [rows_with_images(make_full_images(), slice(sample, sample + 1), config) for sample in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in batches[:2]] == [[0], [1, 2]] and batches[2] == {}
    assert rows_with_images(make_full_images(), slice(0, 3), config)["pixel_values"].shape[0] == 3


def test_per_sample_tiles_stay_with_samples_without_images():
    batch = {"input_ids": torch.tensor(INPUT_IDS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1, 1, 1)}
    batches = [
        rows_with_images(batch, slice(sample, sample + 1), InternVLConfig(image_token_id=IMAGE)) for sample in range(3)
    ]
    assert [images["pixel_values"].flatten().tolist() for images in batches] == [[0], [1], [2]]


def test_patches_with_several_image_sizes():
    config = Qwen2VLConfig(image_token_id=IMAGE)
    batch = make_patches()
    batches = [rows_with_images(batch, slice(sample, sample + 1), config) for sample in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in batches[:2]] == [[0, 1, 2, 3], list(range(4, 16))]
    assert batches[1]["image_grid_thw"].tolist() == batch["image_grid_thw"][1:].tolist() and batches[2] == {}


def test_pooled_patch_indices_are_relative_to_the_sample():
    # Four patches per crop. Sample 0 has one image; sample 1 has two, the first with two crops.
    pooled = torch.tensor([[0, 1], [2, -1], [4, 5], [8, 11], [12, -1]])
    batch = {
        "input_ids": torch.tensor([[1, IMAGE, 2, IMAGE], [IMAGE, IMAGE, 1, IMAGE], [1, 2, 3, 4]]),
        "pixel_values": torch.arange(16.0).view(4, 4, 1),
        "image_token_pooling": pooled,
        "image_grids": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]),
        "image_num_crops": torch.tensor([1, 2, 1]),
    }
    first, second, third = split(batch, 3, Molmo2Config(image_patch_id=IMAGE))
    assert first["pixel_values"].flatten().tolist() == [0, 1, 2, 3] and third.keys() == {"input_ids"}
    assert torch.equal(first["image_token_pooling"], pooled[:2]) and first["image_num_crops"].tolist() == [1]
    assert second["image_token_pooling"].tolist() == [[0, 1], [4, 7], [8, -1]]
    flat = batch["pixel_values"].flatten()
    assert torch.equal(second["pixel_values"].flatten()[[0, 1, 4, 7, 8]], flat[[4, 5, 8, 11, 12]])


def test_microbatches_keep_their_images():
    first, second, third = split(make_patches(), 3, Qwen2VLConfig(image_token_id=IMAGE))
    assert first["pixel_values"].shape[0] == 4 and second["pixel_values"].shape[0] == 12
    assert third.keys() == {"input_ids"}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[IMAGE, 1], [IMAGE, 1]], "2 image placeholders, but its 3 images"),
        ([[IMAGE, IMAGE, IMAGE], [IMAGE, IMAGE, IMAGE]], "span two samples"),
    ],
)
def test_unmatched_images_are_rejected(ids, message):
    batch = {"input_ids": torch.tensor(ids), "pixel_values": torch.zeros(3, 1, 1, 1)}
    with pytest.raises(ConfigError, match=message):
        rows_with_images(batch, slice(0, 1), InternVLConfig(image_token_id=IMAGE))


def split_samples(batch, config=None):
    config = config or InternVLConfig(image_token_id=IMAGE)
    return [rows_with_images(batch, slice(sample, sample + 1), config) for sample in range(len(batch["input_ids"]))]


UNEVEN_IDS = [[1, IMAGE, 2, 3, 4, 5, 6], [IMAGE, IMAGE, IMAGE, 1, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("image_sizes", [[30, 30], [60, 31], [30, 30]]),
        ("spatial_shapes", [[1, 2], [3, 2], [1, 2]]),
        ("image_position_ids", [[[0, 0], [-1, -1]], [[0, 0], [1, 0]], [[0, 0], [-1, -1]]]),
    ],
)
def test_variable_size_images_use_adjacent_placeholders(name, sizes):
    pixels = torch.arange(3.0).view(3, 1, 1, 1, 1)
    masks = torch.arange(3).view(3, 1)
    batch = {"input_ids": torch.tensor(UNEVEN_IDS), "pixel_values": pixels, name: torch.tensor(sizes)}
    first, second, third = split_samples(batch | {"pixel_attention_mask": masks})
    assert first["pixel_values"].flatten().tolist() == [0] and second["pixel_values"].flatten().tolist() == [1, 2]
    assert second["pixel_attention_mask"].flatten().tolist() == [1, 2] and second[name].tolist() == sizes[1:]
    assert third == {}


def test_equal_size_images_need_equal_placeholder_counts():
    batch = {"input_ids": torch.tensor(UNEVEN_IDS), "pixel_values": torch.zeros(3, 1, 1, 1)}
    with pytest.raises(ConfigError, match="5 image placeholders, but its 3 images"):
        split_samples(batch | {"image_sizes": torch.tensor([[30, 30]] * 3)})


def test_images_without_placeholders_are_rejected():
    batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "pixel_values": torch.zeros(2, 1, 1, 1)}
    with pytest.raises(ConfigError, match="0 image placeholders, but its 2 images"):
        split_samples(batch)


def test_padded_per_sample_images_stay_with_samples():
    """Images are padded to the largest number of images per sample."""
    pixels = torch.arange(6.0).view(3, 2, 1, 1, 1)
    masks = torch.arange(6).view(3, 2)
    batch = {"input_ids": torch.tensor(INPUT_IDS), "pixel_values": pixels, "pixel_attention_mask": masks}
    first, second, third = split_samples(batch)
    assert first["pixel_values"].shape == (1, 2, 1, 1, 1) and third == {}
    assert second["pixel_values"].flatten().tolist() == second["pixel_attention_mask"].flatten().tolist() == [2, 3]
    with pytest.raises(ConfigError, match="pixel_attention_mask has 2 entries for 3"):
        split_samples(batch | {"pixel_attention_mask": masks[:2]})


def test_concatenated_patches():
    sizes = torch.tensor([[2, 2], [2, 6], [2, 2]])
    pixels = torch.arange(20.0).repeat_interleave(7).view(1, 1, 1, 140)
    batch = {"input_ids": torch.tensor(UNEVEN_IDS), "pixel_values": pixels, "target_sizes": sizes}
    first, second, third = split_samples(batch)
    assert first["pixel_values"].shape == (1, 1, 1, 28) and second["pixel_values"].shape == (1, 1, 1, 112)
    assert second["pixel_values"].unique().tolist() == list(range(4, 20)) and third == {}
    with pytest.raises(ConfigError, match="for 3 images of 20 patches"):
        split_samples(batch | {"pixel_values": pixels[..., 1:]})


def test_image_counts_are_per_sample():
    batch = {"input_ids": torch.tensor(UNEVEN_IDS), "pixel_values": torch.zeros(3, 2, 1, 1, 1)}
    batch |= {"image_sizes": torch.tensor([[30, 30]] * 3), "batch_num_images": torch.tensor([1, 2, 0])}
    first, second, third = split_samples(batch)
    assert [microbatch["batch_num_images"].tolist() for microbatch in (first, second)] == [[1], [2]] and third == {}


def test_local_patches_follow_their_images():
    batch = {"input_ids": torch.tensor(UNEVEN_IDS), "pixel_values": torch.zeros(3, 1, 1, 1)}
    batch |= {"pixel_values_local": torch.arange(4.0).view(4, 1), "num_local_patches": [0, 4, 0]}
    first, second, _ = split_samples(batch)
    assert "pixel_values_local" not in first and first["num_local_patches"] == [0]
    assert second["pixel_values_local"].flatten().tolist() == [0, 1, 2, 3] and second["num_local_patches"] == [4, 0]


def test_stages_without_vision_encoder_get_only_positions():
    batch = {name: torch.zeros(1) for name in ("input_ids", "image_grid_thw", "target_sizes", "mm_token_type_ids")}
    image_inputs = ("pixel_values", "pixel_attention_mask", "high_res_pixel_values", "pixel_values_local")
    assert without_pixels(batch | {name: torch.zeros(1) for name in image_inputs}).keys() == batch.keys()


@pytest.mark.parametrize("name", ["pixel_values_videos", "video_grid_thw", "input_features", "image_pixel_values"])
def test_pipelines_reject_videos_and_audio(name):
    """Rejected even with one entry per sample, because nothing ties an entry to its sample."""
    with pytest.raises(UnsupportedError, match=f"{name}: a pipeline cannot split it"):
        split({"input_ids": torch.ones(4, 6, dtype=torch.long), name: torch.ones(4, 3)}, 2)


def test_image_positions_from_a_mask():
    image_mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.long), "image_embeds_position_mask": image_mask}
    batch |= {"pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}
    first, second, third = split(batch, 3, Kosmos2Config())
    assert first["pixel_values"].flatten().tolist() == [0] and third["pixel_values"].flatten().tolist() == [1, 2]
    assert second.keys() == {"input_ids", "image_embeds_position_mask"}


def test_qformer_inputs_follow_their_videos():
    config = InstructBlipVideoConfig(video_token_index=IMAGE)
    pixels, questions = torch.arange(6.0).view(3, 2, 1, 1, 1), torch.arange(3).view(3, 1)
    batch = {"input_ids": torch.tensor(INPUT_IDS), "pixel_values": pixels, "qformer_input_ids": questions}
    first, second, third = split_samples(batch, config)
    assert first["qformer_input_ids"].tolist() == [[0]] and second["qformer_input_ids"].tolist() == [[1], [2]]
    assert second["pixel_values"].flatten().tolist() == [2, 3, 4, 5] and third == {}
    assert "qformer_input_ids" in without_pixels(batch)


def test_images_without_placeholder_tokens():
    batch = {"input_ids": torch.tensor(INPUT_IDS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}
    assert [images["pixel_values"].item() for images in split_samples(batch, GitConfig())] == [0, 1, 2]
